//! Where a file is.

use reqwest::Url;
use tokio::sync::Mutex;

use crate::client::http::Http;
use crate::client::{Artefact, Client, ClientError, ended, resolve};
use crate::ids::JobId;

/// Where a file is. It is not shown: whoever has it can download.
pub struct Link<'a> {
    pub(super) http: Http,
    url: Mutex<Url>,
    /// Who gives another one when it has expired.
    of: Option<(&'a Client, JobId)>,
}

impl<'a> Link<'a> {
    /// A link that one was given.
    ///
    /// # Errors
    /// [`ClientError::Invalid`]: it is no `http` or `https` URL.
    pub fn of_url(url: &str) -> Result<Link<'static>, ClientError> {
        let is_absolute = !url.starts_with('/');
        let url = resolve("", url).filter(|_| is_absolute).ok_or_else(|| {
            ClientError::Invalid(
                "the link must be an http or https URL; copy it as a whole, in quotes".to_owned(),
            )
        })?;
        Ok(Link {
            http: Http::new()?,
            url: Mutex::new(url),
            of: None,
        })
    }

    /// The link of a job. When it has expired the client asks for another one.
    ///
    /// # Errors
    /// [`ClientError::Strange`]: the server gave one that is none.
    pub fn of_job(
        client: &'a Client,
        job: JobId,
        artefact: &Artefact,
    ) -> Result<Link<'a>, ClientError> {
        Ok(Link {
            http: client.http.clone(),
            url: Mutex::new(job_link(client, artefact)?),
            of: Some((client, job)),
        })
    }

    pub(super) async fn now(&self) -> Url {
        self.url.lock().await.clone()
    }

    /// Gives a link other than `stale`, if there is one to be had.
    pub(super) async fn another(&self, stale: &Url) -> Result<Option<Url>, ClientError> {
        let Some((client, job)) = self.of else {
            return Ok(None);
        };
        // Held over the request, so that several connections ask once.
        let mut url = self.url.lock().await;
        if *url == *stale {
            let (status, _) = client.status(job).await?;
            let artefact = ended(&status)?.ok_or_else(|| {
                ClientError::Strange("the export was done and is not any more".to_owned())
            })?;
            *url = job_link(client, &artefact)?;
        }
        Ok(Some(url.clone()))
    }
}

fn job_link(client: &Client, artefact: &Artefact) -> Result<Url, ClientError> {
    resolve(&client.server, &artefact.url).ok_or_else(|| {
        ClientError::Strange(
            "the server gave a download link that is none; look at its public_url".to_owned(),
        )
    })
}
