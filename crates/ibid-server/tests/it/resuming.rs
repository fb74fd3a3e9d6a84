//! Downloads by the program of which the server dies, or the program itself.

use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};

use crate::harness::{join, message};
use crate::hostile::{Answer, Hostile, Request, file};
use crate::process::{Place, Running, Served, on_thread};

/// A conversation whose export has 20 MB: more than what is on its way at any moment.
fn large() -> Vec<String> {
    let noise = |n: u64| {
        let digests = (0..4000_u64).flat_map(move |m| Sha256::digest((n * 4000 + m).to_be_bytes()));
        base64::engine::general_purpose::STANDARD.encode(digests.collect::<Vec<u8>>())
    };
    let said = (0..160).map(|n| message("c", &noise(n)));
    std::iter::once(join("c", "alice")).chain(said).collect()
}

struct Stage {
    place: Place,
    token: String,
    server: Served,
}

impl Stage {
    fn open() -> Stage {
        let place = Place::new();
        place.import("log.jsonl", &large());
        let token = place.token("alice");
        let server = place.serve(&[]);
        Stage {
            place,
            token,
            server,
        }
    }

    /// A fresh link, without the address of the server.
    async fn link(&self) -> String {
        let url = format!("{}/exports", self.server.base);
        let request = self.server.client.get(url).bearer_auth(&self.token);
        let text = request.send().await.expect("an answer").text().await;
        let list: Value = serde_json::from_str(&text.expect("text")).expect("JSON");
        let url = list["exports"][0]["download"]["url"].as_str();
        url.expect("a link").to_owned()
    }

    fn output(&self) -> std::path::PathBuf {
        self.place.folder.path().join("out.gz")
    }

    fn export(&self) -> Running {
        let mut command = self.place.command(&["export", "--json", "-o", "out.gz"]);
        command.env("IBID_SERVER", &self.server.base);
        command.env("IBID_TOKEN", &self.token);
        Running::start(command.stderr(std::process::Stdio::null()))
    }

    /// Pauses a process as soon as some of the file is there, and sees that not all of it is.
    async fn pause_in_the_middle(&self, process: &Running) {
        let part = self.place.folder.path().join("out.gz.part");
        while !part.metadata().is_ok_and(|part| part.len() > 0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        kill_process(Pid::from_child(&process.child), Signal::STOP).expect("told");
        assert!(!self.output().exists(), "the download was too fast");
    }

    /// The server dies, and another one takes its place and its port.
    fn replace_server(&mut self) {
        let _ = self.server.process.child.kill();
        let _ = self.server.process.child.wait();
        let address = self.server.base.strip_prefix("http://").expect("a URL");
        self.server = self.place.serve_at(address, &[], &[]);
    }
}

fn go_on(process: &Running) {
    kill_process(Pid::from_child(&process.child), Signal::CONT).expect("told");
}

fn sha256(path: &Path) -> String {
    hex::encode(Sha256::digest(std::fs::read(path).expect("the file")))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_outlives_the_server_and_the_client() {
    let mut stage = Stage::open();
    // The server dies in the middle of the body.
    let mut export = stage.export();
    stage.pause_in_the_middle(&export).await;
    stage.replace_server();
    go_on(&export);
    let done: Value = serde_json::from_str(&export.line()).expect("what it has done");
    assert_eq!(done["sha256"], sha256(&stage.output()));
    assert_eq!(done["replayed"], false);
    let first = done["sha256"].clone();
    drop(export);

    // The client dies in a silence, and the same command goes on.
    std::fs::remove_file(stage.output()).expect("removed");
    let silent = stalling(&stage.server.base, 5_000_000).await;
    let mut command = stage.place.command(&["download", "-", "-o", "out.gz"]);
    let link = stage.link().await;
    let text = stage.place.folder.path().join("link");
    std::fs::write(&text, format!("{silent}{link}\n")).expect("written");
    command.stdin(std::fs::File::open(&text).expect("opened"));
    let download = Running::start(command.stderr(std::process::Stdio::null()));
    let known = stage.place.folder.path().join("out.gz.part.json");
    let is_known = || {
        let text = std::fs::read_to_string(&known).unwrap_or_default();
        text.contains("\"done\":[[0,")
    };
    while !is_known() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    download.kill();
    assert!(!stage.output().exists());
    let link = format!("{}{}", stage.server.base, stage.link().await);
    let ran = stage
        .place
        .run(&["download", &link, "-o", "out.gz", "--json"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let done: Value = serde_json::from_str(&ran.out).expect("what it has done");
    assert_eq!(done["sha256"], sha256(&stage.output()));
    assert_eq!(done["sha256"], first);
    assert!(done["resumed"].as_u64() > Some(0), "{done}");
    let names = std::fs::read_dir(stage.place.folder.path()).expect("a folder");
    let names = names.map(|entry| entry.expect("an entry").file_name());
    let litter = names.filter(|name| name.to_string_lossy().starts_with("out.gz."));
    assert_eq!(litter.count(), 0);
}

/// A way to the server that passes so many bytes of what it says and then stands still.
async fn stalling(base: &str, bytes: u64) -> String {
    let to = base.strip_prefix("http://").expect("a URL").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(&to).await.expect("connected");
            tokio::spawn(async move {
                let (mut from, mut to) = server.split();
                let (mut asks, mut gets) = client.split();
                let mut from = (&mut from).take(bytes);
                let answering = async {
                    let _ = tokio::io::copy(&mut from, &mut gets).await;
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    _ = tokio::io::copy(&mut asks, &mut to) => {}
                    () = answering => {}
                }
            });
        }
    });
    format!("http://{address}")
}

/// A way to answer, the exit code that the command ends with, and whether there is a file then.
type Behaviour = (fn(&Request) -> Answer, i32, bool);

/// The tests of the library try many more; these end without waiting.
const BEHAVIOURS: [Behaviour; 12] = [
    (|request| honest(request), 0, true),
    (
        |request| match request.number {
            0..3 => honest(request).cut_after(40_000),
            _ => honest(request),
        },
        0,
        true,
    ),
    // It takes no ranges, and breaks off once.
    (
        |request| match request.number {
            0 => Answer::whole(&file(1)).cut_after(40_000),
            _ => Answer::whole(&file(1)),
        },
        0,
        true,
    ),
    // It lies about them.
    (
        |request| match (request.number, &request.range) {
            (0, _) => honest(request).cut_after(40_000),
            (_, Some(_)) => honest(request).with("Content-Range", "bytes 0-9/10"),
            (_, None) => honest(request),
        },
        0,
        true,
    ),
    // It has another file by then, and does not say so.
    (
        |request| match request.number {
            0 => Answer::honest(request, &file(2))
                .with("ETag", "\"x\"")
                .cut_after(40_000),
            1 => Answer::careless(request, &file(1)).with("ETag", "\"x\""),
            _ => honest(request),
        },
        0,
        true,
    ),
    (
        |request| {
            let mut answer = honest(request);
            answer.body.truncate(1000);
            answer.with("Content-Length", "1000")
        },
        1,
        false,
    ),
    (
        |request| {
            let mut answer = honest(request);
            answer.body[7] ^= 1;
            answer
        },
        1,
        false,
    ),
    (
        |request| honest(request).without("Content-Length"),
        1,
        false,
    ),
    (|request| honest(request).without("Repr-Digest"), 1, false),
    (|_| Answer::status(307).with("Location", "/again"), 1, false),
    (
        |_| Answer::problem(403, "link-expired", "The link has expired."),
        3,
        false,
    ),
    (|_| Answer::status(404), 3, false),
];

fn honest(request: &Request) -> Answer {
    Answer::honest(request, &file(1))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_misbehaves_never_makes_the_command_leave_a_wrong_file() {
    for (number, (answer, code, is_there)) in BEHAVIOURS.into_iter().enumerate() {
        let server = Hostile::start(answer).await;
        let url = server.url();
        let (ran, found) = on_thread(move || {
            let place = Place::new();
            let ran = place.run(&["download", &url, "-o", "x.gz"]);
            let found = std::fs::read(place.folder.path().join("x.gz")).ok();
            (ran, found)
        })
        .await;
        assert_eq!(ran.code, Some(code), "{number}: {ran:?}");
        assert!(!ran.err.contains("secret"), "{number}: {ran:?}");
        assert_eq!(found.is_some(), is_there, "{number}: {ran:?}");
        assert!(found.is_none_or(|found| found == file(1)), "{number}");
    }
}
