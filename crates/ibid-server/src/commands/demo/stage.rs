//! Where the demo plays: a data folder, its processes, and a client.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use reqwest::RequestBuilder;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::PATIENCE;
use crate::commands::Failure;

/// A data folder with its server.
pub struct Stage {
    folder: PathBuf,
    /// Of PostgreSQL, if not SQLite in the folder.
    database: Option<String>,
    program: PathBuf,
    client: reqwest::Client,
    server: Option<Child>,
    base: String,
}

/// An answer of the API.
pub struct Answer {
    pub status: u16,
    pub body: Value,
}

impl Answer {
    pub fn text(&self, member: &str) -> String {
        self.body[member].as_str().unwrap_or_default().to_owned()
    }
}

impl Stage {
    pub fn new(folder: &Path, database: Option<&str>) -> Result<Stage, Failure> {
        std::fs::create_dir_all(folder).map_err(lost)?;
        Ok(Stage {
            folder: folder.to_owned(),
            database: database.map(str::to_owned),
            program: std::env::current_exe().map_err(lost)?,
            client: crate::commands::http_client()?,
            server: None,
            base: String::new(),
        })
    }

    /// A process of this very program on this folder. It dies with the demo.
    fn ibid(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .arg("--data")
            .arg(self.folder.join("data"))
            .args(self.database.iter().flat_map(|url| ["--database", url]))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// Runs a command to its end and gives what it printed.
    async fn output(&self, arguments: &[&str]) -> Result<String, Failure> {
        let mut command = self.ibid(arguments);
        let output = command
            .stderr(Stdio::piped())
            .output()
            .await
            .map_err(lost)?;
        if !output.status.success() {
            let what = String::from_utf8_lossy(&output.stderr);
            let command = arguments.first().unwrap_or(&"");
            return Err(Failure::failed(format!(
                "`ibid {command}` failed: {}; please report this",
                what.trim()
            )));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Imports `events` and gives how many were taken.
    pub async fn import(&self, name: &str, events: &[String]) -> Result<u64, Failure> {
        let path = self.folder.join(name);
        std::fs::write(&path, events.join("\n") + "\n").map_err(lost)?;
        let path = path.display().to_string();
        let report = self.output(&["import", &path, "--json"]).await?;
        let report: Value = serde_json::from_str(report.trim()).unwrap_or_default();
        Ok(report["accepted"].as_u64().unwrap_or(0))
    }

    pub async fn token(&self, user: &str) -> Result<String, Failure> {
        let token = self.output(&["token", "create", "--user", user]).await?;
        Ok(token.trim().to_owned())
    }

    pub async fn admin(&self, arguments: &[&str]) -> Result<(), Failure> {
        let all: Vec<&str> = std::iter::once("admin")
            .chain(arguments.iter().copied())
            .collect();
        self.output(&all).await.map(drop)
    }

    /// Starts a server that leaves the work to others, and reads from its first line where it
    /// listens.
    pub async fn serve(&mut self) -> Result<(), Failure> {
        let mut server = self
            .ibid(&[
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--workers",
                "0",
                "--part-messages",
                "200",
            ])
            .spawn()
            .map_err(lost)?;
        let line = read_line(&mut server).await?;
        let at = line
            .find("http://")
            .ok_or_else(|| lost("the server did not start"))?;
        line[at..].trim_end().clone_into(&mut self.base);
        self.server = Some(server);
        Ok(())
    }

    pub fn worker(&self, arguments: &[&str]) -> Result<Child, Failure> {
        let mut command = self.ibid(&["worker", "--lease-seconds", "1"]);
        command.args(arguments).spawn().map_err(lost)
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(format!("{}{path}", self.base))
    }

    pub async fn post(&self, token: &str, key: &str, body: &Value) -> Result<Answer, Failure> {
        let request = self
            .client
            .post(format!("{}/exports", self.base))
            .bearer_auth(token)
            .header("Idempotency-Key", key)
            .header("Content-Type", "application/json")
            .body(body.to_string());
        answer(request).await
    }

    pub async fn status(&self, token: &str, job: &str) -> Result<Answer, Failure> {
        answer(self.get(&format!("/exports/{job}")).bearer_auth(token)).await
    }

    /// Asks for the status until it is as wanted.
    pub async fn wait(
        &self,
        token: &str,
        job: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value, Failure> {
        let asking = async {
            loop {
                let status = self.status(token, job).await?.body;
                if wanted(&status) {
                    return Ok(status);
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, asking)
            .await
            .unwrap_or_else(|_| Err(lost("the export did not go on")))
    }

    /// Stops the server in order.
    pub async fn end(mut self) -> Result<(), Failure> {
        match self.server.take() {
            Some(server) => stop(server).await,
            None => Ok(()),
        }
    }
}

async fn answer(request: RequestBuilder) -> Result<Answer, Failure> {
    let response = request.send().await.map_err(unreachable)?;
    let status = response.status().as_u16();
    let body = response.bytes().await.map_err(unreachable)?;
    Ok(Answer {
        status,
        body: serde_json::from_slice(&body).unwrap_or_default(),
    })
}

/// Asks a process to stop (SIGTERM) and waits for its end.
pub async fn stop(mut child: Child) -> Result<(), Failure> {
    let id = child.id().and_then(|id| i32::try_from(id).ok());
    if let Some(id) = id.and_then(rustix::process::Pid::from_raw) {
        rustix::process::kill_process(id, rustix::process::Signal::TERM)
            .map_err(|e| lost(std::io::Error::from(e)))?;
    }
    match tokio::time::timeout(PATIENCE, child.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(lost(format!("a process ended with {status}"))),
        Ok(Err(error)) => Err(lost(error)),
        Err(_) => Err(lost("a process did not stop")),
    }
}

/// The first line that a process prints, as JSON.
pub async fn first_line(child: &mut Child) -> Result<Value, Failure> {
    let line = read_line(child).await?;
    serde_json::from_str(&line).map_err(lost)
}

async fn read_line(child: &mut Child) -> Result<String, Failure> {
    let stdout = child.stdout.take().ok_or_else(|| lost("no output"))?;
    let mut line = String::new();
    let mut reader = BufReader::new(stdout);
    match tokio::time::timeout(PATIENCE, reader.read_line(&mut line)).await {
        Ok(Ok(_)) => {
            child.stdout = Some(reader.into_inner());
            Ok(line)
        }
        Ok(Err(error)) => Err(lost(error)),
        Err(_) => Err(lost("a process printed nothing")),
    }
}

/// Something that the demo needs of this machine did not work.
pub fn lost(error: impl ToString) -> Failure {
    Failure::failed(format!(
        "the demo cannot go on: {}; please report this",
        error.to_string()
    ))
}

pub fn unreachable(error: reqwest::Error) -> Failure {
    lost(error.without_url())
}

/// The text of a gzip file.
pub fn gunzip(file: &[u8]) -> Result<String, Failure> {
    let text = ibid::segment::inflate_artefact(file).map_err(lost)?;
    String::from_utf8(text).map_err(lost)
}
