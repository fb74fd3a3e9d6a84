//! A real S3 server over HTTP, with signatures, whose calls fail, hang or are cut where a test says.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, server::conn::http1};
use hyper_util::rt::TokioIo;
use ibid::time::Time;
use ibid::vault::Vault;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s_fs::FileSystem;

const BUCKET: &str = "vault";

pub struct S3Server {
    folder: tempfile::TempDir,
    address: std::net::SocketAddr,
    faults: Arc<Faults>,
    presigned: Arc<Mutex<Vec<hyper::HeaderMap>>>,
    serving: tokio::task::JoinHandle<()>,
}

/// What becomes of calls.
#[derive(Default)]
pub struct Faults {
    calls: AtomicU64,
    /// So many of a hundred calls fail, at places that look random and are always the same.
    percent: AtomicU32,
    /// How they fail.
    how: AtomicU32,
    joins: std::sync::Mutex<Join>,
}

/// What becomes of calls that ask to join the pieces of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Join {
    #[default]
    Plain,
    /// It takes two seconds, in which the answer begins and goes on with white space.
    Long,
    /// It takes two seconds, in which nothing is said.
    Silent,
    /// The pieces are joined, and the connection ends without an answer.
    Unanswered,
    /// The status is 200, and what comes is an error of this name; the pieces are not joined.
    Fails(&'static str),
}

const JOIN_TAKES: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The answer is 503.
    Refused = 0,
    /// The connection ends without an answer.
    Cut = 1,
    /// The answer never comes.
    Hangs = 2,
    /// The call is carried out, and the connection ends without an answer.
    Unanswered = 3,
    /// The answer is 403, and its body says how the request was signed.
    Denied = 4,
}

/// As Amazon S3 answers where the secret key is wrong.
const DENIED: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>
<Error><Code>SignatureDoesNotMatch</Code><Message>The request signature does not match.</Message>\
<AWSAccessKeyId>AKIDEXAMPLE</AWSAccessKeyId><CanonicalRequest>PUT
/vault/x
x-amz-security-token:SESSIONTOKEN
</CanonicalRequest></Error>";

impl Faults {
    /// From now on so many of a hundred calls fail.
    pub fn set(&self, percent: u32, how: Fault) {
        self.how.store(how as u32, Ordering::SeqCst);
        self.percent.store(percent, Ordering::SeqCst);
    }

    /// From now on this becomes of calls that join pieces.
    pub fn set_joins(&self, join: Join) {
        *self.joins.lock().unwrap() = join;
    }

    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    fn next(&self) -> Option<Fault> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        let noise = call.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) % 100;
        if noise >= u64::from(self.percent.load(Ordering::SeqCst)) {
            return None;
        }
        Some(match self.how.load(Ordering::SeqCst) {
            0 => Fault::Refused,
            1 => Fault::Cut,
            2 => Fault::Hangs,
            3 => Fault::Unanswered,
            _ => Fault::Denied,
        })
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the connection is cut")]
struct CutOff;

type Answer = hyper::Response<s3s::Body>;

/// Of an upload that is not there S3 says NoSuchUpload; this server does not tell it from
/// somebody else's.
fn known(mut answer: Answer) -> Answer {
    if answer.status() == hyper::StatusCode::FORBIDDEN {
        *answer.status_mut() = hyper::StatusCode::NOT_FOUND;
    }
    answer
}

/// Joins the pieces of an object, to the end even if nobody waits for it any more, as S3 does.
async fn joined(
    service: S3Service,
    request: Request<Incoming>,
    join: Join,
) -> Result<Answer, CutOff> {
    // What is asked is here before anybody can go away.
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| CutOff)?.to_bytes();
    let request = Request::from_parts(head, s3s::Body::from(body));
    let joining = async move {
        let joined = tokio::spawn(async move {
            if matches!(join, Join::Long | Join::Silent) {
                tokio::time::sleep(JOIN_TAKES).await;
            }
            service.call(request).await.map(known)
        });
        joined.await.map_err(|_| CutOff)?.map_err(|_| CutOff)
    };
    match join {
        Join::Plain | Join::Silent => joining.await,
        Join::Unanswered => joining.await.and(Err(CutOff)),
        Join::Fails(name) => {
            let error = format!("<Error><Code>{name}</Code><Message>It failed.</Message></Error>");
            Ok(Answer::new(s3s::Body::from(error)))
        }
        Join::Long => {
            let (body, whitespace) = tokio::sync::mpsc::channel(1);
            tokio::spawn(async move {
                tokio::pin!(joining);
                loop {
                    let space = tokio::time::sleep(Duration::from_millis(100));
                    let answer = tokio::select! {
                        answer = &mut joining => answer,
                        () = space => {
                            let _ = body.send(Bytes::from_static(b" ")).await;
                            continue;
                        }
                    };
                    if let Ok(answer) = answer
                        && let Ok(all) = answer.into_body().collect().await
                    {
                        let text = String::from_utf8_lossy(&all.to_bytes()).into_owned();
                        // Nothing may come before the declaration.
                        let text = text.split_once("?>").map_or(&*text, |(_, rest)| rest);
                        let _ = body.send(text.to_owned().into()).await;
                    }
                    return;
                }
            });
            let body = futures::stream::unfold(whitespace, |mut whitespace| async {
                let next = whitespace.recv().await?;
                Some((Ok::<_, CutOff>(Frame::data(next)), whitespace))
            });
            Ok(Answer::new(s3s::Body::http_body_unsync(StreamBody::new(
                body,
            ))))
        }
    }
}

impl S3Server {
    pub async fn start() -> S3Server {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(BUCKET)).unwrap();
        let mut builder = S3ServiceBuilder::new(FileSystem::new(folder.path()).unwrap());
        builder.set_auth(SimpleAuth::from_single("key", "secret"));
        let service = builder.build();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let faults = Arc::new(Faults::default());
        let failing = Arc::clone(&faults);
        let presigned = Arc::<Mutex<Vec<_>>>::default();
        let noted = Arc::clone(&presigned);
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (service, faults) = (service.clone(), Arc::clone(&failing));
                let noted = Arc::clone(&noted);
                let answer = hyper::service::service_fn(move |request: Request<Incoming>| {
                    let query = request.uri().query().unwrap_or_default();
                    if query.contains("X-Amz-Signature=") {
                        noted.lock().unwrap().push(request.headers().clone());
                    }
                    let (service, fault) = (service.clone(), faults.next());
                    let join = *faults.joins.lock().unwrap();
                    async move {
                        match fault {
                            None => {}
                            Some(Fault::Unanswered) => {
                                let _ = service.call(request.map(s3s::Body::from)).await;
                                return Err(CutOff);
                            }
                            Some(Fault::Cut) => return Err(CutOff),
                            Some(Fault::Hangs) => std::future::pending().await,
                            Some(Fault::Denied) => {
                                let mut answer = Answer::new(s3s::Body::from(DENIED.to_owned()));
                                *answer.status_mut() = hyper::StatusCode::FORBIDDEN;
                                return Ok(answer);
                            }
                            Some(Fault::Refused) => {
                                let mut answer = Answer::default();
                                *answer.status_mut() = hyper::StatusCode::SERVICE_UNAVAILABLE;
                                return Ok(answer);
                            }
                        }
                        let of_upload = request
                            .uri()
                            .query()
                            .is_some_and(|query| query.contains("uploadId="));
                        if of_upload && request.method() == hyper::Method::POST {
                            return joined(service, request, join).await;
                        }
                        let gives_up = of_upload && request.method() == hyper::Method::DELETE;
                        let answer = service.call(request.map(s3s::Body::from)).await;
                        let answer = answer.map_err(|_| CutOff)?;
                        Ok(if gives_up { known(answer) } else { answer })
                    }
                });
                tokio::spawn(async move {
                    let connection = http1::Builder::new();
                    let _ = connection
                        .serve_connection(TokioIo::new(stream), answer)
                        .await;
                });
            }
        });
        S3Server {
            folder,
            address,
            faults,
            presigned,
            serving,
        }
    }

    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// The heads of the requests that were allowed by their address, so far.
    pub fn presigned(&self) -> Vec<hyper::HeaderMap> {
        self.presigned.lock().unwrap().clone()
    }

    /// Where it answers.
    pub fn address(&self) -> std::net::SocketAddr {
        self.address
    }

    /// The vault in this store, below `prefix`.
    pub fn vault(&self, prefix: &str) -> Vault {
        self.vault_through(self.address, prefix)
    }

    /// The same, reached by another address.
    pub fn vault_through(&self, address: std::net::SocketAddr, prefix: &str) -> Vault {
        let mut variables = self.variables();
        variables[0].1 = format!("http://{address}");
        let variables = variables.iter().map(|(name, value)| (*name, &**value));
        // Shorter than outside of tests.
        let options = variables.chain([("timeout", "500ms"), ("read_timeout", "500ms")]);
        Vault::at_url(&self.url(prefix), options).unwrap()
    }

    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}")
    }

    /// By which a client reaches it.
    pub fn variables(&self) -> [(&'static str, String); 5] {
        [
            ("AWS_ENDPOINT_URL", format!("http://{}", self.address)),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ]
    }

    /// Makes an object that was last written at `time`.
    pub fn put(&self, path: &str, time: Time) {
        let path = self.folder.path().join(BUCKET).join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = std::fs::File::create(path).unwrap();
        let since = std::time::Duration::from_micros(time.micros() as u64);
        file.set_modified(std::time::UNIX_EPOCH + since).unwrap();
    }

    /// Every file of the store below `prefix`.
    pub fn objects(&self, prefix: &str) -> Vec<String> {
        let mut found = Vec::new();
        let root = self.folder.path().join(BUCKET).join(prefix);
        files(&root, &root, &mut found);
        found.sort();
        found
    }

    /// What there is of uploads that are neither finished nor given up.
    pub fn unfinished(&self) -> usize {
        self.count(".upload")
    }

    /// The pieces alone, without what is known of their uploads.
    pub fn pieces(&self) -> usize {
        self.count(".upload_id-")
    }

    fn count(&self, prefix: &str) -> usize {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with(prefix)).count()
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn files(root: &Path, folder: &Path, found: &mut Vec<String>) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            files(root, &path, found);
        } else {
            let name: PathBuf = path.strip_prefix(root).unwrap().to_owned();
            found.push(name.to_str().unwrap().to_owned());
        }
    }
}
