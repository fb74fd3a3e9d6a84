//! Stands before a server as a network does: cuts, holds back and loses what passes where a test
//! says.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::pg_server::PgServer;

const PORT: u16 = 6543;

/// What becomes of the chunks that pass.
#[derive(Default)]
pub struct Weather {
    /// Of all connections: where something happens looks random.
    chunks: AtomicU64,
    /// Of a thousand chunks so many end their connection.
    cuts: AtomicU32,
    /// Of a thousand chunks so many are lost, and with them all that comes later on their
    /// connection, which stays open: as behind a firewall that has forgotten it.
    losses: AtomicU32,
    /// How long each chunk is held back.
    delay_ms: AtomicU64,
    /// The next time that these bytes are asked, the connection ends instead of an answer.
    unanswered: Mutex<Option<&'static [u8]>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Passes,
    Cut,
    Lost,
}

impl Weather {
    pub fn set(&self, cuts: u32, losses: u32, delay_ms: u64) {
        self.cuts.store(cuts, Ordering::SeqCst);
        self.losses.store(losses, Ordering::SeqCst);
        self.delay_ms.store(delay_ms, Ordering::SeqCst);
    }

    /// Lets a server do, once, what these bytes ask for, and loses the answer.
    pub fn lose_answer_to(&self, asked: &'static [u8]) {
        *self.unanswered.lock().unwrap() = Some(asked);
    }

    fn loses_answer_to(&self, chunk: &[u8]) -> bool {
        let holds = |asked: &mut &[u8]| chunk.windows(asked.len()).any(|bytes| bytes == *asked);
        self.unanswered.lock().unwrap().take_if(holds).is_some()
    }

    async fn next(&self) -> Fate {
        tokio::time::sleep(Duration::from_millis(self.delay_ms.load(Ordering::SeqCst))).await;
        let noise = self
            .chunks
            .fetch_add(1, Ordering::SeqCst)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23)
            % 1000;
        let cuts = u64::from(self.cuts.load(Ordering::SeqCst));
        let losses = u64::from(self.losses.load(Ordering::SeqCst));
        match noise {
            noise if noise < cuts => Fate::Cut,
            noise if noise < cuts + losses => Fate::Lost,
            _ => Fate::Passes,
        }
    }
}

pub struct Proxy {
    pub weather: Arc<Weather>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Before a PostgreSQL server.
pub struct PgProxy {
    folder: tempfile::TempDir,
    pub proxy: Proxy,
}

impl PgProxy {
    pub fn start(server: &PgServer) -> PgProxy {
        let to: PathBuf = std::fs::read_dir(server.folder())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| {
                let name = path.file_name().unwrap().to_str().unwrap();
                name.starts_with(".s.PGSQL.") && !name.ends_with(".lock")
            })
            .expect("the server's socket");
        let folder = tempfile::Builder::new()
            .prefix("ibid-proxy-")
            .tempdir_in("/tmp")
            .unwrap();
        let listener = UnixListener::bind(folder.path().join(format!(".s.PGSQL.{PORT}"))).unwrap();
        let weather = Arc::<Weather>::default();
        let over = Arc::clone(&weather);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (to, over) = (to.clone(), Arc::clone(&over));
                tokio::spawn(async move {
                    if let Ok(server) = UnixStream::connect(&to).await {
                        pass(client, server, over).await;
                    }
                });
            }
        });
        let proxy = Proxy { weather, accepting };
        PgProxy { folder, proxy }
    }

    pub fn url(&self, database: &str) -> String {
        let folder = self.folder.path().display().to_string();
        let folder = folder.replace('/', "%2F");
        format!("postgres://postgres@{folder}:{PORT}/{database}")
    }
}

/// Before a server at `to`; gives also where it is reached.
pub async fn before(to: SocketAddr) -> (Proxy, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let weather = Arc::<Weather>::default();
    let over = Arc::clone(&weather);
    let accepting = tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let over = Arc::clone(&over);
            tokio::spawn(async move {
                if let Ok(server) = TcpStream::connect(to).await {
                    pass(client, server, over).await;
                }
            });
        }
    });
    (Proxy { weather, accepting }, address)
}

async fn pass<S>(client: S, server: S, weather: Arc<Weather>)
where
    S: AsyncRead + AsyncWrite,
{
    let (from_client, to_client) = tokio::io::split(client);
    let (from_server, to_server) = tokio::io::split(server);
    let unanswered = AtomicBool::new(false);
    let asked = |chunk: &[u8]| {
        if weather.loses_answer_to(chunk) {
            unanswered.store(true, Ordering::SeqCst);
        }
        true
    };
    let answered = |_: &[u8]| !unanswered.load(Ordering::SeqCst);
    tokio::select! {
        () = flow(from_client, to_server, &weather, asked) => {}
        () = flow(from_server, to_client, &weather, answered) => {}
    }
}

/// Passes chunks on as long as `may_pass` says so.
async fn flow(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    weather: &Weather,
    may_pass: impl Fn(&[u8]) -> bool,
) {
    let mut chunk = vec![0; 16 * 1024];
    let mut lost = false;
    while let Ok(length @ 1..) = from.read(&mut chunk).await {
        match weather.next().await {
            Fate::Cut => return,
            Fate::Lost => lost = true,
            Fate::Passes => {}
        }
        if !may_pass(&chunk[..length]) {
            return;
        }
        if !lost && to.write_all(&chunk[..length]).await.is_err() {
            return;
        }
    }
}
