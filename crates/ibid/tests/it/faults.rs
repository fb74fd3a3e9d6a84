//! A network that fails, a database that restarts, a store that is away: jobs wait, go on by
//! themselves, and end with the right bytes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use ibid::cut::CutRule;
use ibid::export::State;
use ibid::exporter::{Database, Databases, ExportTerms, Exporter};
use ibid::ids::{JobId, UserId};
use ibid::key::IdempotencyKey;
use ibid::ledger::CreateError;
use ibid::time::Clock;
use ibid::vault::Key;
use ibid::verify::verify;
use ibid::worker::{Worker, WorkerTerms};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

use crate::events::{chat, join, say};
use crate::harness::{NO_LIMITS, On, UNTIL_IDLE, import_into, on_postgres, request, work};
use crate::pg_server::PgServer;
use crate::s3_server::{Fault, S3Server};

on_postgres!(jobs_outlast_a_network_that_fails_and_a_server_that_restarts);

const PORT: u16 = 6543;

/// Stands before a PostgreSQL server, and cuts what passes where a test says.
struct Proxy {
    folder: tempfile::TempDir,
    /// Of a thousand chunks so many end their connection; all of them is a server that is gone.
    cuts: Arc<AtomicU32>,
    /// How long each chunk is held back.
    delay_ms: Arc<AtomicU64>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Proxy {
    fn start(server: &PgServer) -> Proxy {
        let to = std::fs::read_dir(server.folder())
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
        let (cuts, delay_ms) = (Arc::<AtomicU32>::default(), Arc::<AtomicU64>::default());
        let (cut, delay) = (Arc::clone(&cuts), Arc::clone(&delay_ms));
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(
                    client,
                    to.clone(),
                    Arc::clone(&cut),
                    Arc::clone(&delay),
                ));
            }
        });
        Proxy {
            folder,
            cuts,
            delay_ms,
            accepting,
        }
    }

    fn url(&self, database: &str) -> String {
        let folder = self.folder.path().display().to_string();
        let folder = folder.replace('/', "%2F");
        format!("postgres://postgres@{folder}:{PORT}/{database}")
    }

    fn set(&self, cuts: u32, delay_ms: u64) {
        self.cuts.store(cuts, Ordering::SeqCst);
        self.delay_ms.store(delay_ms, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Chunks that have passed, of all connections: where one is cut looks random.
static CHUNKS: AtomicU64 = AtomicU64::new(0);

async fn pass(client: UnixStream, to: PathBuf, cuts: Arc<AtomicU32>, delay_ms: Arc<AtomicU64>) {
    let Ok(server) = UnixStream::connect(&to).await else {
        return;
    };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let spoiled = || async {
        tokio::time::sleep(Duration::from_millis(delay_ms.load(Ordering::SeqCst))).await;
        let noise = CHUNKS
            .fetch_add(1, Ordering::SeqCst)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23);
        noise % 1000 < u64::from(cuts.load(Ordering::SeqCst))
    };
    let up = async {
        let mut chunk = vec![0; 16 * 1024];
        while let Ok(length @ 1..) = from_client.read(&mut chunk).await {
            if spoiled().await || to_server.write_all(&chunk[..length]).await.is_err() {
                return;
            }
        }
    };
    let down = async {
        let mut chunk = vec![0; 16 * 1024];
        while let Ok(length @ 1..) = from_server.read(&mut chunk).await {
            if spoiled().await || to_client.write_all(&chunk[..length]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
    }
}

async fn open(url: &str, s3: &S3Server) -> Exporter {
    let database = Database::Postgres(url.to_owned());
    let databases = Databases::open(&database, None, Clock::system()).await;
    let terms = ExportTerms {
        limits: NO_LIMITS,
        cut: CutRule {
            part_bytes: 1024 * 1024,
            part_messages: 40,
        },
        link_life: Duration::from_secs(300),
    };
    Exporter::on(databases.unwrap(), s3.vault("faults"), terms)
}

/// Asks until there is an answer, with one key, as a client does; gives the job.
async fn ask(exporter: &Exporter, user: &str, key: &str) -> JobId {
    let key = IdempotencyKey::parse(key.as_bytes()).unwrap();
    let user = UserId::parse(user).unwrap();
    loop {
        let asked = exporter.request(user.clone(), key.clone(), request("all"));
        match asked.await {
            Ok(ibid::ledger::Created::New(export) | ibid::ledger::Created::Replayed(export)) => {
                return export.job_id;
            }
            Err(CreateError::Ledger(_)) => tokio::time::sleep(Duration::from_millis(50)).await,
            Err(error) => panic!("{error}"),
        }
    }
}

async fn file(exporter: &Exporter, job: JobId) -> Vec<u8> {
    let export = exporter.ledger.find(job).await.unwrap().unwrap().export;
    let claim = export.artefact.unwrap().claim;
    let key = Key::Artefact { job, claim };
    exporter.vault.get(key).await.unwrap().to_vec()
}

async fn jobs_outlast_a_network_that_fails_and_a_server_that_restarts(on: &On) {
    let On::Postgres(server) = on else {
        unreachable!("it is a test on PostgreSQL");
    };
    server.create_database("faults").await;
    let (proxy, s3) = (Proxy::start(server), S3Server::start().await);
    let direct_url = server.url("faults");
    let pg = ibid::postgres::Pg::connect(&direct_url).await.unwrap();
    pg.migrate().await.unwrap();
    let direct = open(&direct_url, &s3).await;
    let mut lines = chat(800);
    lines.push(join("busy", "bob"));
    let (report, _) = import_into(direct.source.as_ref(), lines.join("\n").as_bytes(), false).await;
    report.unwrap();
    let undisturbed = ask(&direct, "ann", "undisturbed").await;
    work(direct.workshop(2, None), UNTIL_IDLE).await;
    let expected = file(&direct, undisturbed).await;

    let exporter = open(&proxy.url("faults"), &s3).await;
    let stop = CancellationToken::new();
    let mut workers = Vec::new();
    for _ in 0..2 {
        let terms = WorkerTerms {
            workers: 2,
            lease: Duration::from_secs(2),
            poll: Duration::from_millis(50),
            until_idle: false,
            ..UNTIL_IDLE
        };
        let workshop = exporter.workshop(2, None);
        let worker = Worker::new(workshop, terms, exporter.created(), |_| {});
        let stop = stop.clone();
        workers.push(tokio::spawn(async move { worker.run(&stop).await }));
    }
    let (mut anns, mut bobs) = (Vec::new(), Vec::new());
    let superuser = server.connect("postgres").await;
    for phase in 0..6 {
        match phase {
            // Of each of them 5 % fail; chunks are several to a statement.
            0 => {
                proxy.set(10, 0);
                s3.faults().set(5, Fault::Cut);
            }
            1 => {
                proxy.set(0, 20);
                s3.faults().set(5, Fault::Refused);
            }
            2 => proxy.set(1000, 0),
            3 => {
                proxy.set(0, 0);
                s3.faults().set(100, Fault::Refused);
            }
            4 => {
                s3.faults().set(5, Fault::Unanswered);
                let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                           WHERE datname = 'faults'";
                superuser.batch_execute(sql).await.unwrap();
            }
            _ => {
                let restarting = Arc::clone(server);
                tokio::task::spawn_blocking(move || restarting.restart())
                    .await
                    .unwrap();
            }
        }
        let ended = tokio::time::Instant::now() + Duration::from_millis(1500);
        while tokio::time::Instant::now() < ended {
            // Through a network that lets nothing pass nobody can ask.
            let ask_at = if phase == 2 { &direct } else { &exporter };
            let key = format!("{phase}-{}", anns.len());
            anns.push(ask(ask_at, "ann", &key).await);
            let line = say("busy", &key);
            let appended = import_into(direct.source.as_ref(), line.as_bytes(), false).await;
            if appended.0.is_ok() {
                bobs.push(ask(ask_at, "bob", &key).await);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    proxy.set(0, 0);
    s3.faults().set(0, Fault::Refused);
    assert!(anns.len() >= 12 && bobs.len() >= 12);
    let all: Vec<JobId> = anns.iter().chain(&bobs).copied().collect();
    // Longer than `until` has patience: one that waited for long looks again after as long.
    let finishing = async {
        loop {
            let queue = direct.ledger.queue().await.unwrap();
            if queue.queued + queue.running == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let finished = tokio::time::timeout(Duration::from_secs(120), finishing).await;
    finished.expect("all jobs end by themselves");
    stop.cancel();
    for worker in workers {
        worker.await.unwrap().unwrap();
    }
    for job in &all {
        let export = direct.ledger.find(*job).await.unwrap().unwrap().export;
        assert_eq!(export.state, State::Done, "{:?}", export.problem);
        let (source, ledger) = (direct.source.as_ref(), direct.ledger.as_ref());
        let found = verify(source, ledger, &direct.vault, *job, &mut |_, _| {}).await;
        assert!(
            found.as_ref().is_ok_and(|found| found.is_good()),
            "{found:?}"
        );
    }
    for job in &anns {
        assert!(file(&direct, *job).await == expected);
    }
    let janitor = direct.janitor(Duration::from_secs(90 * 86_400));
    janitor.sweep_all().await.unwrap();
    assert_eq!(s3.objects("faults").len(), all.len() + 2);
    assert_eq!(s3.unfinished(), 0);
}
