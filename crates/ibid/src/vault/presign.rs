//! Downloads that the object store serves itself, by an address that is signed with its keys.

use std::time::Duration;

use object_store::signer::{Method, SignedUrlOptions};
use object_store::{Attribute, Attributes};

use super::{Key, Vault, VaultError};
use crate::ids::JobId;

/// What is asked of the object behind a signed address, which serves one of these alone (but on
/// Azure).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Its bytes, or a range of them.
    Bytes,
    /// What is known of it, without its bytes.
    Head,
}

/// The media type of an artefact.
const MEDIA_TYPE: &str = "application/gzip";

/// What a browser does with an artefact: it saves it, under a name of its own.
fn disposition(job: JobId) -> String {
    format!("attachment; filename=\"export-{job}.jsonl.gz\"")
}

/// What is kept with an artefact in an object store, so that whoever fetches it there sees what
/// it is. It has no encoding: the file is the compressed one.
pub(super) fn attributes(key: Key) -> Attributes {
    match key {
        Key::Part { .. } => Attributes::new(),
        Key::Artefact { job, .. } => Attributes::from_iter([
            (Attribute::ContentType, MEDIA_TYPE.to_owned()),
            (Attribute::ContentDisposition, disposition(job)),
        ]),
    }
}

impl Vault {
    /// An address at which the object store gives the artefact of `job` to whoever has it, for
    /// `life` (whole seconds, from 1 to a week) from now on. `None` where the vault is a folder.
    ///
    /// S3 and Google Cloud Storage are told in the address under which name and type to give it,
    /// and that no cache may keep it. Azure signs nothing of the kind and says what was kept with
    /// the object; of one that was sent in pieces that is the type alone.
    ///
    /// The address is a secret for as long as it lives. A response that has begun goes on after
    /// that.
    ///
    /// # Errors
    /// There are no keys with which it could be signed, or they cannot be fetched now.
    pub async fn presign(
        &self,
        key: Key,
        asked: Asked,
        life: Duration,
    ) -> Result<Option<String>, VaultError> {
        let Some(signing) = &self.signing else {
            return Ok(None);
        };
        let method = match asked {
            Asked::Bytes => Method::GET,
            // The right to read is enough, and the signer knows of none for HEAD.
            Asked::Head if signing.is_azure => Method::GET,
            Asked::Head => Method::HEAD,
        };
        let mut options = SignedUrlOptions::new();
        if let (false, Key::Artefact { job, .. }) = (signing.is_azure, key) {
            options = options.with_query([
                ("response-content-type", MEDIA_TYPE.to_owned()),
                ("response-content-disposition", disposition(job)),
                ("response-cache-control", "private, no-store".to_owned()),
            ]);
        }
        let (signer, path) = (&signing.signer, key.path());
        let signed = signer
            .signed_url_opts(method, &path, life, &options)
            .await?;
        Ok(Some(signed.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::ClaimId;

    /// The address of an artefact for ten seconds.
    async fn address(vault: &Vault, asked: Asked) -> Option<String> {
        let key = Key::Artefact {
            job: JobId::from_bytes([1; 16]),
            claim: ClaimId::from_bytes([2; 16]),
        };
        let life = Duration::from_secs(10);
        vault.presign(key, asked, life).await.unwrap()
    }

    #[tokio::test]
    async fn an_address_says_how_the_file_is_called_where_the_store_takes_that() {
        let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
        let vault = Vault::at_url("s3://bucket/p", keys).unwrap();
        let s3 = address(&vault, Asked::Bytes).await.unwrap();
        assert!(s3.contains("/bucket/p/"), "{s3}");
        assert!(s3.contains("X-Amz-Expires=10&"), "{s3}");
        let name = format!("export-{}.jsonl.gz", JobId::from_bytes([1; 16]));
        assert!(s3.contains(&name), "{s3}");
        assert!(s3.contains("response-cache-control="), "{s3}");
        assert_ne!(address(&vault, Asked::Head).await, Some(s3));
    }

    #[tokio::test]
    async fn azure_signs_for_reading_alone() {
        let keys = [
            ("AZURE_STORAGE_ACCOUNT_NAME", "a"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "a2V5"),
        ];
        let vault = Vault::at_url("az://container/p", keys).unwrap();
        for asked in [Asked::Bytes, Asked::Head] {
            let azure = address(&vault, asked).await.unwrap();
            assert!(azure.contains("/container/p/"), "{azure}");
            assert!(azure.split(['?', '&']).any(|one| one == "sp=r"), "{azure}");
        }
    }

    #[tokio::test]
    async fn a_folder_has_no_address() {
        let folder = tempfile::tempdir().unwrap();
        let vault = Vault::in_folder(folder.path()).unwrap();
        assert_eq!(address(&vault, Asked::Bytes).await, None);
    }
}
