//! A server from its first to its last breath: the lock on the data folder, the port, the
//! workers inside, and the orderly end.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ibid::worker::Worker;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::api::{App, Watched, router, watching_router};
use crate::edge::{Edge, serve};
use crate::port::Port;

/// How often the files of signing keys and of the certificate are looked at.
const FILES_LOOK: Duration = Duration::from_secs(5);

/// `ibid doctor` holds the lock for a moment to see whether somebody does; that is waited out.
const GLANCES: u32 = 5;
const GLANCE: Duration = Duration::from_millis(20);

/// The lock that one `serve` holds on a data folder: a file of its own, because SQLite's must
/// not be opened by anybody else.
#[derive(Debug)]
pub struct ServeLock {
    /// Kept open: the lock ends with it.
    _file: File,
}

/// Why the lock could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error(
        "another `ibid serve` (process {process}) uses the data folder {folder}; stop it, or \
         give this one another folder with --data"
    )]
    Held { process: String, folder: PathBuf },
    #[error(
        "cannot write {path}: {source}; make the data folder writable, or name another with --data"
    )]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
}

impl ServeLock {
    /// Takes the lock on `folder`, which is created (for its owner only) where it is missing.
    ///
    /// # Errors
    /// Another process holds it, or the folder cannot be written.
    pub fn take(folder: &Path) -> Result<ServeLock, LockError> {
        use std::os::unix::fs::DirBuilderExt as _;
        let path = folder.join("serve.lock");
        let io = |source| LockError::Io {
            path: path.clone(),
            source,
        };
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(io)?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(io)?;
        let mut locked = flock(&file);
        for _ in 0..GLANCES {
            if locked.is_ok() {
                break;
            }
            std::thread::sleep(GLANCE);
            locked = flock(&file);
        }
        match locked {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut process = String::new();
                let _ = file.read_to_string(&mut process);
                let process = match process.trim() {
                    "" => "unknown".to_owned(),
                    process => process.to_owned(),
                };
                return Err(LockError::Held {
                    process,
                    folder: folder.to_owned(),
                });
            }
            Err(error) => return Err(io(error.into())),
        }
        file.set_len(0).map_err(io)?;
        file.rewind().map_err(io)?;
        writeln!(file, "{}", std::process::id()).map_err(io)?;
        Ok(ServeLock { _file: file })
    }
}

fn flock(file: &File) -> rustix::io::Result<()> {
    rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
}

/// Serves the API on `port`, whose connections are like `edge`, with `worker` beside it, until
/// `stop`. Then nothing new is taken, and requests and parts in hand have `drain` to end; what is
/// left then is cut. The metrics are told on `port`, or on `watching` alone if that is given.
pub async fn run<F, Io>(
    port: Port<F>,
    edge: Edge,
    app: Arc<App>,
    watching: Option<TcpListener>,
    worker: Option<Worker>,
    stop: CancellationToken,
    drain: Duration,
) where
    F: Fn(TcpStream) -> Io + Send + 'static,
    Io: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let hearing = app.exporter.clone();
    let keys = Arc::clone(&app.keys);
    let tls = edge.tls.clone();
    let looking = stop.clone();
    tokio::spawn(async move {
        while looking
            .run_until_cancelled(tokio::time::sleep(FILES_LOOK))
            .await
            .is_some()
        {
            keys.reload_if_changed();
            if let Some(tls) = &tls {
                tls.reload_if_changed();
            }
        }
    });
    let (stopping, told) = (app.stopping.clone(), stop.clone());
    tokio::spawn(async move {
        told.cancelled().await;
        stopping.cancel();
    });
    let janitor = app.exporter.janitor(app.record);
    let sweeping = stop.clone();
    tokio::spawn(async move { janitor.run(&sweeping).await });
    let watched = Watched {
        exporter: app.exporter.clone(),
        metrics: Arc::clone(&app.metrics),
    };
    let router = router(app, watching.is_some());
    let work = async {
        let Some(worker) = &worker else {
            return;
        };
        tokio::select! {
            () = hearing.hear_of_jobs() => {}
            ended = worker.run(&stop) => {
                if let Err(error) = ended {
                    tracing::error!(%error, "the worker ended");
                }
            }
        }
    };
    let both = async {
        tokio::join!(serve(port, edge, router, &stop), work);
    };
    tokio::select! {
        () = both => {}
        () = watch(watching, watched, &stop) => {}
        () = async {
            stop.cancelled().await;
            tokio::time::sleep(drain).await;
        } => tracing::warn!("stopped before all requests and parts in hand had ended"),
    }
}

/// Tells those who watch the process how it is, on `listener` if there is one, until `stop`.
/// Never ends by itself: what is done beside it says when the process may.
pub async fn watch(listener: Option<TcpListener>, watched: Watched, stop: &CancellationToken) {
    if let Some(listener) = listener {
        let port = Port::new(listener, |stream| stream);
        serve(port, Edge::watching(), watching_router(watched), stop).await;
    }
    std::future::pending().await
}
