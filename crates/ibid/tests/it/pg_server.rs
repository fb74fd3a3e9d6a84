//! A real PostgreSQL of a test's own: a cluster in a temporary folder, reached through a socket
//! in it and not over the network, stopped and removed when the test ends.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tokio_postgres::NoTls;

/// As root the server will not run; it runs as this user then.
const UNPRIVILEGED: [&str; 2] = ["postgres", "nobody"];

/// Speed over durability of what lives for seconds. A crash of the server alone loses nothing.
const SETTINGS: &str = "
listen_addresses = ''
fsync = off
full_page_writes = off
shared_buffers = 32MB
max_connections = 60
max_prepared_transactions = 8
deadlock_timeout = 200ms
autovacuum_naptime = 5s
log_min_messages = warning
";

pub struct PgServer {
    folder: tempfile::TempDir,
    programs: Programs,
}

impl PgServer {
    /// Starts a server, or says that `test` is skipped where PostgreSQL is not installed.
    pub fn start(test: &str) -> Option<PgServer> {
        let Some(programs) = Programs::find() else {
            eprintln!("skipped: {test}, because PostgreSQL's server programs are not installed");
            return None;
        };
        // The path of a socket may have 107 bytes, so it is not below the target folder.
        let folder = tempfile::Builder::new()
            .prefix("ibid-pg-")
            .tempdir_in("/tmp")
            .unwrap();
        let server = PgServer { folder, programs };
        let template = server.programs.template();
        run(Command::new("cp")
            .arg("-a")
            .arg(template)
            .arg(server.data()));
        server.give_away(server.folder());
        server.ctl(&["start", "-w", "-l", &server.log()]);
        Some(server)
    }

    /// The address of a database, as the administrator of this server.
    pub fn url(&self, database: &str) -> String {
        self.url_as("postgres", database)
    }

    pub fn url_as(&self, role: &str, database: &str) -> String {
        let folder = self.folder.path().display().to_string();
        format!(
            "postgres://{role}@{}/{database}",
            folder.replace('/', "%2F")
        )
    }

    /// A plain connection.
    pub async fn connect(&self, database: &str) -> tokio_postgres::Client {
        connect(&self.url(database)).await
    }

    pub async fn connect_as(&self, role: &str, database: &str) -> tokio_postgres::Client {
        connect(&self.url_as(role, database)).await
    }

    pub async fn create_database(&self, name: &str) {
        self.create_database_with(name, "").await;
    }

    /// Creates a database with more said about it, such as its collation.
    pub async fn create_database_with(&self, name: &str, how: &str) {
        let client = self.connect("postgres").await;
        let sql = format!("CREATE DATABASE {name} {how}");
        client.batch_execute(&sql).await.unwrap();
    }

    /// Stops the server in good order and starts it again.
    pub fn restart(&self) {
        self.ctl(&["restart", "-w", "-m", "fast", "-l", &self.log()]);
    }

    /// Lets the server crash: no checkpoint, connections cut.
    pub fn stop_immediate(&self) {
        self.ctl(&["stop", "-w", "-m", "immediate"]);
    }

    /// Starts the server after it was stopped.
    pub fn start_again(&self) {
        self.ctl(&["start", "-w", "-l", &self.log()]);
    }

    /// Starts the server again as a standby that waits for more to read, after a stop in good
    /// order.
    pub fn become_standby(&self) {
        self.ctl(&["stop", "-w", "-m", "fast"]);
        std::fs::write(self.data().join("standby.signal"), "").unwrap();
        self.start_again();
    }

    /// A program that runs as the server does.
    pub fn command(&self, program: &Path) -> Command {
        self.programs.command(program)
    }

    /// Makes a folder the property of whom the server runs as.
    pub fn give_away(&self, path: &Path) {
        run(Command::new("chmod").arg("755").arg(path));
        self.programs.give_away(path);
    }

    /// Where the server's socket is.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn log(&self) -> String {
        let log = self.folder.path().join("log");
        log.to_str().unwrap().to_owned()
    }

    fn ctl(&self, args: &[&str]) {
        let mut command = self.programs.command("pg_ctl");
        command.arg("-D").arg(self.data()).arg("-s").args(args);
        command.arg("-o");
        command.arg(format!("-k {}", self.folder.path().display()));
        let output = command.output().unwrap();
        if !output.status.success() {
            let log = std::fs::read_to_string(self.log()).unwrap_or_default();
            panic!("{command:?}: {}\n{log}", errors(&output));
        }
    }
}

impl Drop for PgServer {
    fn drop(&mut self) {
        let mut command = self.programs.command("pg_ctl");
        command.arg("-D").arg(self.data());
        // A test may have stopped it already.
        let _ = command
            .args(["-s", "stop", "-w", "-m", "immediate"])
            .output();
    }
}

async fn connect(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    // It ends with the client, or with the server.
    tokio::spawn(connection);
    client
}

/// Where the server's programs are and as whom they run.
struct Programs {
    folder: PathBuf,
    user: Option<&'static str>,
}

impl Programs {
    fn find() -> Option<Programs> {
        let packaged = std::fs::read_dir("/usr/lib/postgresql")
            .into_iter()
            .flatten();
        let packaged = packaged.map(|version| version.unwrap().path().join("bin"));
        let mut packaged: Vec<PathBuf> = packaged.collect();
        packaged.sort_by_key(|folder| {
            let version = folder.parent().and_then(Path::file_name);
            let version = version.and_then(|version| version.to_str()?.parse::<u32>().ok());
            std::cmp::Reverse(version)
        });
        let folder = search_path().into_iter().chain(packaged).find(|folder| {
            ["initdb", "pg_ctl"]
                .iter()
                .all(|it| folder.join(it).exists())
        })?;
        let user = is_root().then(|| {
            let exists = |user: &&str| {
                Command::new("id")
                    .arg(user)
                    .output()
                    .unwrap()
                    .status
                    .success()
            };
            UNPRIVILEGED
                .into_iter()
                .find(exists)
                .expect("a user to run the server as")
        });
        Some(Programs { folder, user })
    }

    fn command(&self, program: impl AsRef<Path>) -> Command {
        let program = self.folder.join(program);
        let mut command = match self.user {
            None => Command::new(program),
            Some(user) => {
                let mut command = Command::new("setpriv");
                let group = format!("--regid={}", group_of(user));
                command.args([&format!("--reuid={user}"), &group, "--clear-groups", "--"]);
                command.arg(program);
                command
            }
        };
        // The current folder may be one that the other user cannot read.
        command.current_dir("/");
        command
    }

    fn give_away(&self, path: &Path) {
        if let Some(user) = self.user {
            let owner = format!("{user}:{}", group_of(user));
            run(Command::new("chown").arg("-R").arg(owner).arg(path));
        }
    }

    /// A fresh cluster, made once and copied by every test: making one takes a second. It is
    /// moved into its place when it is whole, so that tests of several processes may make it at
    /// the same time.
    fn template(&self) -> PathBuf {
        let version = self.folder.join("postgres");
        let version = run(Command::new(version).arg("--version"));
        let version: String = String::from_utf8(version.stdout).unwrap();
        let name = version
            .trim()
            .replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let template = cache.join(format!("pg-template-1-{name}"));
        if template.exists() {
            return template;
        }
        std::fs::create_dir_all(cache).unwrap();
        let making = tempfile::Builder::new()
            .prefix("ibid-initdb-")
            .tempdir_in("/tmp")
            .unwrap();
        run(Command::new("chmod").arg("755").arg(making.path()));
        self.give_away(making.path());
        let data = making.path().join("data");
        run(self
            .command("initdb")
            .args(["--username=postgres", "--auth=trust", "--no-sync"])
            .args(["--encoding=UTF8", "--locale=C.UTF-8", "-D"])
            .arg(&data));
        let settings = data.join("postgresql.conf");
        let mut text = std::fs::read_to_string(&settings).unwrap();
        text.push_str(SETTINGS);
        std::fs::write(&settings, text).unwrap();
        // Another file system than the cache's, perhaps: only a move within one is atomic.
        let beside = tempfile::Builder::new()
            .prefix("pg-")
            .tempdir_in(cache)
            .unwrap();
        let copy = beside.path().join("data");
        run(Command::new("cp").arg("-a").arg(&data).arg(&copy));
        if let Err(error) = std::fs::rename(&copy, &template) {
            // Another test was faster.
            assert!(template.exists(), "{error}");
        }
        template
    }
}

pub fn search_path() -> Vec<PathBuf> {
    #[expect(
        clippy::disallowed_methods,
        reason = "where programs are installed is no configuration of the product"
    )]
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).collect()
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn group_of(user: &str) -> String {
    let group = run(Command::new("id").args(["-gn", user])).stdout;
    String::from_utf8(group).unwrap().trim().to_owned()
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", errors(&output));
    output
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
