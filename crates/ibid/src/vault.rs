//! Where parts and artefacts are kept: an object store, which on a laptop is a folder.

mod disk;
mod error;
mod presign;
mod probe;
mod upload;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::multipart::MultipartStore;
use object_store::prefix::PrefixStore;
use object_store::signer::Signer;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, ObjectStoreExt as _, RetryConfig};

use self::upload::JOIN_LIMIT;
pub use self::upload::Upload;
use crate::failpoint::failpoint;
use crate::ids::{ClaimId, JobId};

pub use error::VaultError;
pub use presign::Asked;
pub use probe::PROBE_PREFIX;

use disk::{delete_files, names_in, on_disk};

/// Spells every path in the vault. Paths are made from ids only, and each attempt at a job
/// writes under its own claim, so a worker that overstays touches nothing that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Part {
        job: JobId,
        claim: ClaimId,
        number: u64,
    },
    Artefact {
        job: JobId,
        claim: ClaimId,
    },
}

impl Key {
    fn path(self) -> object_store::path::Path {
        match self {
            Key::Part { job, claim, number } => format!("{job}/{claim}/part-{number:06}").into(),
            Key::Artefact { job, claim } => format!("{job}/{claim}/export.jsonl.gz").into(),
        }
    }
}

/// The size of the ranges in which an artefact is fetched from an object store. Each is one
/// request, so a slow reader does not hold a request open; two are in memory for each download.
const FETCH_BYTES: u64 = 1024 * 1024;

/// How long one request to an object store may take, and how long all tries of it together.
const REQUEST_LIMIT: Duration = Duration::from_secs(30);
const RETRY_LIMIT: Duration = Duration::from_secs(60);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
const MOST_RETRIES: usize = 4;

/// The store of parts and artefacts.
#[derive(Clone)]
pub struct Vault {
    store: Arc<dyn ObjectStore>,
    place: Place,
    /// How addresses are signed under which the store itself serves an object.
    signing: Option<Signing>,
    least_free_bytes: u64,
}

#[derive(Clone)]
struct Signing {
    signer: Arc<dyn Signer>,
    /// Whether it signs the right to read instead of one request with all that is in it.
    is_azure: bool,
}

#[derive(Clone)]
enum Place {
    Folder(PathBuf),
    Objects(Objects),
}

/// In it an object of any size is made out of pieces, under an id that can be given up.
#[derive(Clone)]
struct Objects {
    store: Arc<dyn MultipartStore>,
    /// The same store, of which an answer may take long to end, if it goes on.
    joining: Arc<dyn MultipartStore>,
    pieces_take_attributes: bool,
}

/// Whether the address of a vault is that of an object store that this program can use:
/// `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`.
pub fn is_object_store(url: &str) -> bool {
    split_url(url).is_some()
}

/// The scheme, the bucket and the prefix of an address.
fn split_url(url: &str) -> Option<(&str, &str, &str)> {
    let (scheme, rest) = url.split_once("://")?;
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let known = matches!(scheme, "s3" | "gs" | "az");
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let prefix_is_plain = prefix
        .trim_end_matches('/')
        .split('/')
        .all(|name| name.chars().all(plain) && name != "." && name != "..");
    let named = !bucket.is_empty() && bucket.chars().all(plain);
    (known && named && prefix_is_plain).then_some((scheme, bucket, prefix))
}

/// Whether `text` is `http` or `https`, a host with an optional port, and an optional path. A user
/// and password would stand in the reason why an export has to wait.
fn is_server(text: &str) -> bool {
    let rest = text.strip_prefix("https://");
    let Some(rest) = rest.or_else(|| text.strip_prefix("http://")) else {
        return false;
    };
    let (at, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, port) = match at.rsplit_once(':') {
        // The last colon of `[::1]` is the address's own.
        Some((host, port)) if !port.ends_with(']') => (host, port.parse::<u16>().is_ok()),
        _ => (at, true),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let host_is_good = match host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
    {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(plain),
    };
    host_is_good && port && path.chars().all(|c| plain(c) || matches!(c, '/' | '~'))
}

/// Whether requests can be made with this option of the stores of `scheme`; the client panics
/// where they cannot.
fn check_option(scheme: &str, name: &str, value: &str) -> Result<(), &'static str> {
    let is_address = match scheme {
        "s3" => matches!(
            name,
            "aws_endpoint"
                | "aws_endpoint_url"
                | "aws_endpoint_url_s3"
                | "aws_endpoint_url_sts"
                | "aws_metadata_endpoint"
        ),
        "gs" => name == "google_base_url",
        _ => matches!(name, "azure_endpoint" | "azure_storage_endpoint"),
    };
    if is_address {
        let form = "an address as https://HOST:PORT, without user and password";
        return is_server(value).then_some(()).ok_or(form);
    }
    let is_region = scheme == "s3" && matches!(name, "aws_region" | "aws_default_region");
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if is_region && !value.chars().all(plain) {
        return Err("the name of a region, as eu-west-1");
    }
    Ok(())
}

impl Vault {
    /// The vault in a folder of a local disk, which is created (for its owner only) where it is
    /// missing. What was written survives a power cut once the call has answered.
    ///
    /// # Errors
    /// The folder cannot be created or is not one.
    pub fn in_folder(folder: &Path) -> Result<Vault, VaultError> {
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|e| {
                VaultError::Unavailable(format!("cannot create {}: {e}", folder.display()))
            })?;
        let store = LocalFileSystem::new_with_prefix(folder)?.with_fsync(true);
        Ok(Vault {
            store: Arc::new(store),
            place: Place::Folder(folder.to_owned()),
            signing: None,
            least_free_bytes: 0,
        })
    }

    /// The vault in an object store. `options` are the variables by which the store's own tools
    /// are configured, as `AWS_REGION` and `AWS_ACCESS_KEY_ID`; those that mean nothing to this
    /// store, and those that are empty, are ignored. Nothing is sent yet.
    ///
    /// # Errors
    /// The address is none, or something that it needs is missing.
    pub fn at_url<'a>(
        url: &str,
        options: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Vault, VaultError> {
        let Some((scheme, bucket, prefix)) = split_url(url) else {
            let what = "the address must be s3://, gs:// or az:// with a bucket and a prefix of \
                        plain names";
            return Err(VaultError::Unavailable(what.to_owned()));
        };
        // Without one the client would panic; a second one is refused, which is no error.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut given = Vec::new();
        for (name, value) in options {
            if value.is_empty() {
                continue;
            }
            let lower = name.to_ascii_lowercase();
            check_option(scheme, &lower, value)
                .map_err(|what| VaultError::Unavailable(format!("{name} must be {what}")))?;
            given.push((lower, value));
        }
        let options = given.into_iter();
        let client = ClientOptions::new()
            .with_timeout(REQUEST_LIMIT)
            .with_read_timeout(REQUEST_LIMIT)
            .with_connect_timeout(CONNECT_LIMIT)
            // Where an object that is sent in pieces takes no attributes.
            .with_content_type_for_suffix("gz", "application/gzip");
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(100),
                max_backoff: Duration::from_secs(5),
                base: 2.0,
            },
            max_retries: MOST_RETRIES,
            retry_timeout: RETRY_LIMIT,
        };
        // The builders have the same methods and no trait in common.
        macro_rules! store {
            ($builder:ty, $in_bucket:ident) => {{
                let build = |limit: Option<(String, &str)>| {
                    let mut builder = <$builder>::new()
                        .with_client_options(client.clone())
                        .with_retry(retry.clone());
                    for (name, value) in options.clone().chain(limit) {
                        if let Ok(key) = name.parse() {
                            builder = builder.with_config(key, value);
                        }
                    }
                    builder.$in_bucket(bucket).build()
                };
                let limit = format!("{}s", JOIN_LIMIT.as_secs());
                let joining = build(Some(("timeout".to_owned(), &limit)))?;
                Vault::of(build(None)?, joining, scheme, prefix)
            }};
        }
        Ok(match scheme {
            "s3" => store!(AmazonS3Builder, with_bucket_name),
            "gs" => store!(GoogleCloudStorageBuilder, with_bucket_name),
            _ => store!(MicrosoftAzureBuilder, with_container_name),
        })
    }

    fn of<S>(store: S, joining: S, scheme: &str, prefix: &str) -> Vault
    where
        S: ObjectStore + MultipartStore + Signer + Clone,
    {
        let store = PrefixStore::new(store, prefix);
        let is_azure = scheme == "az";
        let objects = Objects {
            store: Arc::new(store.clone()),
            joining: Arc::new(PrefixStore::new(joining, prefix)),
            pieces_take_attributes: !is_azure,
        };
        Vault {
            store: Arc::new(store.clone()),
            signing: Some(Signing {
                signer: Arc::new(store),
                is_azure,
            }),
            place: Place::Objects(objects),
            least_free_bytes: 0,
        }
    }

    /// The same, which begins to write nothing that would leave fewer bytes free on its disk:
    /// others write there too, the database for one. An object store has no such end.
    #[must_use]
    pub fn leaving_free(mut self, bytes: u64) -> Vault {
        self.least_free_bytes = bytes;
        self
    }

    /// Whether `bytes` more may be written.
    fn check_room(&self, bytes: u64) -> Result<(), VaultError> {
        let (Place::Folder(folder), least) = (&self.place, self.least_free_bytes) else {
            return Ok(());
        };
        if least == 0 {
            return Ok(());
        }
        let found = rustix::fs::statvfs(folder).map_err(|e| {
            VaultError::Unavailable(format!("cannot look at {}: {e}", folder.display()))
        })?;
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        if free < least.saturating_add(bytes) {
            return Err(VaultError::Full { bytes, free, least });
        }
        Ok(())
    }

    /// The folder that this vault is, if it is one.
    pub fn folder(&self) -> Option<&Path> {
        match &self.place {
            Place::Folder(folder) => Some(folder),
            Place::Objects { .. } => None,
        }
    }

    /// Writes an object whole.
    pub async fn put(&self, key: Key, bytes: Vec<u8>) -> Result<(), VaultError> {
        self.check_room(bytes.len() as u64)?;
        self.store.put(&key.path(), bytes.into()).await?;
        Ok(())
    }

    /// Reads an object whole.
    pub async fn get(&self, key: Key) -> Result<Bytes, VaultError> {
        Ok(self.store.get(&key.path()).await?.bytes().await?)
    }

    /// The length of an object.
    pub async fn length(&self, key: Key) -> Result<u64, VaultError> {
        Ok(self.store.head(&key.path()).await?.size)
    }

    /// The bytes of `range`, as they come. A stream that ends early ends with an error.
    pub async fn read(
        &self,
        key: Key,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, VaultError>>, VaultError> {
        match self.place {
            Place::Folder(_) => self.read_file(key, range).await,
            Place::Objects { .. } => self.fetch(key, range).await,
        }
    }

    /// Reads an object of an object store by ranges, one request for each. The first is here
    /// before this returns, so that what is missing is known before anything is sent on.
    async fn fetch(
        &self,
        key: Key,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, VaultError>>, VaultError> {
        let (store, path) = (Arc::clone(&self.store), key.path());
        let fetch = move |piece: Range<u64>| {
            let (store, path) = (Arc::clone(&store), path.clone());
            async move {
                let bytes = store.get_range(&path, piece.clone()).await?;
                if bytes.len() as u64 != piece.end - piece.start {
                    let what = format!("asked for {piece:?}, got {} bytes", bytes.len());
                    return Err(VaultError::Unavailable(what));
                }
                Ok(bytes)
            }
        };
        let mut pieces = pieces(range);
        let Some(first) = pieces.next() else {
            return Ok(stream::empty().boxed());
        };
        let first = fetch(first).await?;
        let rest = stream::iter(pieces).map(fetch).buffered(1);
        Ok(stream::once(async { Ok(first) }).chain(rest).boxed())
    }

    async fn read_file(
        &self,
        key: Key,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, VaultError>>, VaultError> {
        let options = object_store::GetOptions {
            range: Some(object_store::GetRange::Bounded(range.clone())),
            ..object_store::GetOptions::default()
        };
        let got = self.store.get_opts(&key.path(), options).await?;
        if got.range != range {
            let what = format!("asked for {range:?}, got {:?}", got.range);
            return Err(VaultError::Unavailable(what));
        }
        let missing = range.end - range.start;
        let stream = got.into_stream().map_err(VaultError::from);
        let whole = stream::try_unfold((stream, missing), |(mut stream, missing)| async move {
            match stream.next().await {
                // A file that was cut is read as empty pieces without end.
                Some(Ok(bytes)) if bytes.is_empty() && missing > 0 => Err(VaultError::Unavailable(
                    format!("the object ended {missing} bytes early"),
                )),
                Some(Ok(bytes)) => {
                    let missing = missing.saturating_sub(bytes.len() as u64);
                    Ok(Some((bytes, (stream, missing))))
                }
                Some(Err(error)) => Err(error),
                None if missing > 0 => Err(VaultError::Unavailable(format!(
                    "the object ended {missing} bytes early"
                ))),
                None => Ok(None),
            }
        });
        Ok(whole.boxed())
    }

    /// Whether it is a folder on a disk.
    pub fn is_folder(&self) -> bool {
        matches!(self.place, Place::Folder(_))
    }

    /// The jobs of which something is kept.
    pub async fn jobs(&self) -> Result<Vec<JobId>, VaultError> {
        let names: Vec<String> = match &self.place {
            Place::Folder(folder) => {
                let folder = folder.clone();
                on_disk(move || names_in(&folder)).await?
            }
            Place::Objects { .. } => {
                let listed = self.store.list_with_delimiter(None).await?;
                let names = listed.common_prefixes.iter();
                names
                    .filter_map(|prefix| Some(prefix.filename()?.to_owned()))
                    .collect()
            }
        };
        Ok(names.iter().filter_map(|name| JobId::parse(name)).collect())
    }

    /// Everything that is kept of `job`. Looks at the disk itself, because the store hides what a
    /// write that was killed has left.
    pub async fn objects(&self, job: JobId) -> Result<Vec<Object>, VaultError> {
        match &self.place {
            Place::Folder(folder) => {
                let folder = folder.join(job.to_string());
                on_disk(move || {
                    let mut objects = Vec::new();
                    for claim in names_in(&folder)? {
                        let names = names_in(&folder.join(&claim))?;
                        objects.extend(names.into_iter().map(|name| Object {
                            claim: claim.clone(),
                            name,
                        }));
                    }
                    Ok(objects)
                })
                .await
            }
            Place::Objects { .. } => {
                let prefix = object_store::path::Path::from(job.to_string());
                let listed = self.store.list(Some(&prefix));
                let objects = listed.try_filter_map(|meta| {
                    let mut parts = meta.location.parts().skip(1);
                    let object = match (parts.next(), parts.next()) {
                        (Some(claim), Some(name)) => Some(Object {
                            claim: claim.as_ref().to_owned(),
                            name: name.as_ref().to_owned(),
                        }),
                        _ => None,
                    };
                    std::future::ready(Ok(object))
                });
                Ok(objects.try_collect().await?)
            }
        }
    }

    /// Deletes objects of `job`. One that is gone already is no error.
    pub async fn delete(&self, job: JobId, objects: Vec<Object>) -> Result<(), VaultError> {
        if let Place::Folder(folder) = &self.place {
            let folder = folder.join(job.to_string());
            return on_disk(move || delete_files(&folder, &objects)).await;
        }
        let paths = objects
            .into_iter()
            .map(move |object| Ok(format!("{job}/{}/{}", object.claim, object.name).into()));
        let mut deleted = self.store.delete_stream(stream::iter(paths).boxed());
        while let Some(deleted) = deleted.next().await {
            failpoint!("delete.object");
            match deleted {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whose vault this is: `ledger` if nobody's so far. Objects that a ledger does not name are
    /// deleted only from its own vault.
    pub async fn owner(&self, ledger: &str) -> Result<String, VaultError> {
        let path = object_store::path::Path::from(OWNER);
        let create = object_store::PutMode::Create.into();
        match self
            .store
            .put_opts(&path, ledger.to_owned().into(), create)
            .await
        {
            Ok(_) => return Ok(ledger.to_owned()),
            Err(object_store::Error::AlreadyExists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let bytes = self.store.get(&path).await?.bytes().await?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }
}

/// Where it is written whose vault this is.
const OWNER: &str = "ledger";

/// Something that is kept of a job, by its name, which a write that was killed may have left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    claim: String,
    name: String,
}

impl Object {
    /// Whether it lies where `key` does.
    pub fn is(&self, key: Key) -> bool {
        let path = key.path();
        let mut parts = path.parts().skip(1);
        parts
            .next()
            .is_some_and(|claim| claim.as_ref() == self.claim)
            && parts.next().is_some_and(|name| name.as_ref() == self.name)
    }

    /// Whether it was written under `claim`.
    pub fn is_of(&self, claim: ClaimId) -> bool {
        self.claim == claim.to_string()
    }
}

/// The ranges in which `range` is fetched.
fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> + Send {
    let mut next = range.start;
    std::iter::from_fn(move || {
        let piece = next..range.end.min(next + FETCH_BYTES);
        next = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests;
