//! A release and the next one together, on one database and one vault, while the processes of the
//! first are replaced by those of the second one by one.
//!
//! The next release is the same program, told to be it: it has one more encoder, with which its
//! jobs are created, and one more migration (see `next_release.rs` in the library).

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::harness::{join, message};
use crate::pg_server::PgServer;
use crate::process::{Place, Ran, Running, Served, on_thread, until};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Release {
    This,
    Next,
}

const VARIABLES: [(&str, &str); 1] = [("IBID_TEST_RELEASE", "next")];

impl Release {
    fn variables(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Release::This => &[],
            Release::Next => &VARIABLES,
        }
    }
}

/// Of parts of 20 messages, so that whoever works on it can be stopped in the middle.
const MESSAGES: usize = 3_000;
const CUT: [&str; 2] = ["--part-messages", "20"];
const USERS: usize = 40;

fn chat() -> Vec<String> {
    let user = |number| join("c", &format!("user-{number}"));
    let mut chat: Vec<String> = (0..USERS).map(user).collect();
    let body = |number: usize| format!("message {number} with some words in it");
    chat.extend((0..MESSAGES).map(|number| message("c", &body(number))));
    chat
}

fn is_done(status: &Value) -> bool {
    status["state"] == "done"
}

fn at_work(status: &Value) -> bool {
    status["progress"]["parts_done"].as_u64() > Some(3)
}

/// The artefact's digest as each release makes it when nothing disturbs it.
async fn undisturbed(release: Release) -> Value {
    let place = Place::new();
    place.import("chat.jsonl", &chat());
    let token = place.token("user-0");
    let served = place.serve_at("127.0.0.1:0", &CUT, release.variables());
    let made = served.post(&token, "k", &json!({"scope": "all"})).await;
    let done = served.wait(&token, &made.text("job_id"), is_done).await;
    assert_eq!(done["messages"], MESSAGES);
    done["sha256"].clone()
}

/// A job, and by which release it was created.
struct Job {
    id: String,
    token: String,
    of: Release,
}

struct Installation {
    /// Each release's own folder; the vault is in the first one's.
    places: [Place; 2],
    flags: Vec<String>,
    /// Of the users that have not asked yet.
    tokens: Vec<String>,
    jobs: Vec<Job>,
    server: PgServer,
}

impl Installation {
    fn start(server: PgServer) -> Installation {
        let places = [Place::new(), Place::new()];
        let artifacts = places[0].data().join("artifacts");
        let flags = vec![
            "--database".to_owned(),
            server.url("postgres"),
            "--artifacts".to_owned(),
            format!("file:{}", artifacts.display()),
        ];
        let mut installation = Installation {
            places,
            flags,
            tokens: Vec::new(),
            jobs: Vec::new(),
            server,
        };
        installation.done(Release::This, &["admin", "migrate"]);
        let path = installation.places[0].write("chat.jsonl", &chat());
        installation.done(Release::This, &["import", &path]);
        for number in 0..USERS {
            let user = format!("user-{number}");
            let created = installation.done(Release::This, &["token", "create", "--user", &user]);
            installation.tokens.push(created.out.trim().to_owned());
        }
        installation
    }

    fn place(&self, release: Release) -> &Place {
        &self.places[usize::from(release == Release::Next)]
    }

    fn with_flags<'a>(&'a self, arguments: &[&'a str]) -> Vec<&'a str> {
        let flags = self.flags.iter().map(String::as_str);
        arguments.iter().copied().chain(flags).collect()
    }

    fn command(&self, release: Release, arguments: &[&str]) -> Command {
        let mut command = self.place(release).command(&self.with_flags(arguments));
        command.envs(release.variables().iter().copied());
        command
    }

    fn run(&self, release: Release, arguments: &[&str]) -> Ran {
        let output = self.command(release, arguments).output().expect("it runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Ran {
            code: output.status.code(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    fn done(&self, release: Release, arguments: &[&str]) -> Ran {
        let ran = self.run(release, arguments);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran
    }

    fn serve(&self, release: Release, arguments: &[&str]) -> Served {
        let arguments = [&["--workers", "0"], &CUT[..], arguments].concat();
        let arguments = self.with_flags(&arguments);
        let place = self.place(release);
        place.serve_at("127.0.0.1:0", &arguments, release.variables())
    }

    fn worker(&self, release: Release) -> Running {
        let arguments = ["worker", "--json", "--lease-seconds", "1"];
        let mut command = self.command(release, &arguments);
        Running::start(command.stderr(Stdio::null()))
    }

    /// Asks for everything in the name of somebody who has not asked yet; gives the job's place.
    async fn ask(&mut self, served: &Served, of: Release) -> usize {
        let token = self.tokens.pop().expect("enough users");
        let made = served.post(&token, "k", &json!({"scope": "all"})).await;
        assert_eq!(made.status, 202, "{:?}", made.body);
        let id = made.text("job_id");
        self.jobs.push(Job { id, token, of });
        self.jobs.len() - 1
    }

    async fn wait(&self, served: &Served, job: usize, wanted: impl Fn(&Value) -> bool) -> Value {
        let job = &self.jobs[job];
        served.wait(&job.token, &job.id, wanted).await
    }

    async fn number(&self, sql: &str) -> i64 {
        let client = self.server.connect("postgres").await;
        client.query_one(sql, &[]).await.expect(sql).get(0)
    }
}

/// What workers reported, by job.
#[derive(Default)]
struct Reports(BTreeMap<String, Vec<Value>>);

impl Reports {
    /// Gives those of one process, in order.
    fn read(&mut self, out: &str) -> Vec<Value> {
        // The last line of one that was killed may be cut.
        let whole = out.lines().map(serde_json::from_str);
        let reports: Vec<Value> = whole.map_while(Result::ok).collect();
        for report in &reports {
            let job = report["job_id"].as_str().expect("an id").to_owned();
            self.0.entry(job).or_default().push(report.clone());
        }
        reports
    }

    fn of(&self, job: &Job) -> &[Value] {
        self.0.get(&job.id).map_or(&[], Vec::as_slice)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_is_replaced_by_the_next_one_process_after_process_and_every_file_is_the_same() {
    let Some(server) = PgServer::start("a rolling upgrade") else {
        return;
    };
    let expected = [
        (Release::This, undisturbed(Release::This).await),
        (Release::Next, undisturbed(Release::Next).await),
    ];
    assert_ne!(expected[0].1, expected[1].1);
    let mut home = on_thread(|| Installation::start(server)).await;
    let old_api = home.serve(Release::This, &[]);
    let old_workers: Vec<Running> = (0..4).map(|_| home.worker(Release::This)).collect();
    let (mut by_old, mut by_new) = (Reports::default(), Reports::default());
    let first = home.ask(&old_api, Release::This).await;
    home.wait(&old_api, first, is_done).await;

    // The next release migrates while the first one works.
    let under_way = home.ask(&old_api, Release::This).await;
    home.wait(&old_api, under_way, at_work).await;
    let schema = "SELECT version::bigint FROM ibid.schema_version";
    let before = home.number(schema).await;
    let new_api = home.serve(Release::Next, &["--migrate"]);
    assert_eq!(home.number(schema).await, before + 1);
    home.wait(&old_api, under_way, is_done).await;
    let after = home.ask(&old_api, Release::This).await;
    home.wait(&old_api, after, is_done).await;
    // One of the first release that begins now says what to do, and changes nothing.
    let late = home.run(Release::This, &["worker", "--until-idle"]);
    assert_eq!(late.code, Some(1), "{late:?}");
    assert!(late.err.contains("made by a newer ibid"), "{late:?}");
    assert!(late.err.contains("use that version"), "{late:?}");

    // The same request at either is one job.
    let Job { id, token, .. } = &home.jobs[first];
    let replayed = new_api.post(token, "k", &json!({"scope": "all"})).await;
    assert_eq!((replayed.status, &replayed.text("job_id")), (200, id));

    // A job of the encoder that only the next release has is left alone, and says so.
    for _ in 0..2 {
        let new = home.ask(&new_api, Release::Next).await;
        for api in [&old_api, &new_api] {
            let waits = |status: &Value| status["waiting"]["type"] == "encoder-missing";
            let status = home.wait(api, new, waits).await;
            assert_eq!(
                (&status["state"], &status["attempts"]),
                (&json!("queued"), &json!(0))
            );
            let detail = status["waiting"]["detail"].as_str().expect("a sentence");
            assert!(detail.contains("level 9"), "{detail}");
        }
    }

    // Those of the first release are replaced while they work, by an orderly stop, or by one that
    // is cut short after a moment.
    let mut new_workers = Vec::new();
    let mut last = 0;
    for _ in 0..2 * old_workers.len() {
        last = home.ask(&old_api, Release::This).await;
        home.ask(&new_api, Release::Next).await;
    }
    let mut given_back = 0;
    for (number, worker) in old_workers.into_iter().enumerate() {
        let running = "SELECT count(*) FROM ibid.export WHERE state = 'running' AND progressed";
        until("all are at work", async || home.number(running).await >= 4).await;
        if number % 2 == 0 {
            let (code, out) = on_thread(|| worker.terminate()).await;
            assert_eq!(code, Some(0), "{out}");
            if let Some(report) = by_old.read(&out).last()
                && report["state"] == "queued"
            {
                given_back += 1;
                let job = report["job_id"].as_str().expect("an id");
                let strikes = "SELECT strikes::bigint FROM ibid.export WHERE job_id =";
                assert_eq!(home.number(&format!("{strikes} '{job}'")).await, 0);
            }
        } else {
            worker.signal(Signal::TERM);
            sleep(Duration::from_millis(2 * number as u64)).await;
            let (_, out) = on_thread(move || worker.end(&[Signal::KILL])).await;
            by_old.read(&out);
        }
        new_workers.push(home.worker(Release::Next));
    }
    assert!(given_back > 0);
    // What the first release's API creates after its last worker is finished all the same.
    home.ask(&old_api, Release::This).await;
    let (code, _) = on_thread(|| old_api.process.terminate()).await;
    assert_eq!(code, Some(0));

    for (job, asked) in home.jobs.iter().enumerate() {
        let done = home.wait(&new_api, job, is_done).await;
        let (_, sha256) = expected.iter().find(|it| it.0 == asked.of).expect("both");
        assert_eq!(done["sha256"], *sha256, "{:?}", asked.of);
        assert_eq!(done.get("waiting").filter(|it| !it.is_null()), None);
    }
    for worker in new_workers {
        let (code, out) = on_thread(|| worker.terminate()).await;
        assert_eq!(code, Some(0), "{out}");
        by_new.read(&out);
    }
    let kept = |report: &Value| report["parts_kept"].as_u64() > Some(0);
    let mut gone_on = 0;
    for job in &home.jobs {
        match job.of {
            Release::This => gone_on += usize::from(by_new.of(job).iter().any(kept)),
            Release::Next => assert_eq!(by_old.of(job), [Value::Null; 0], "{}", job.id),
        }
    }
    assert!(gone_on > 0, "nothing was left for the next release");
    let ids = [&home.jobs[first], &home.jobs[last], &home.jobs[last + 1]];
    for id in ids.map(|job| job.id.clone()) {
        home.done(Release::Next, &["verify", &id]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_a_file_open_that_the_next_release_brings_up_to_date_goes_on() {
    let place = Place::new();
    place.import("chat.jsonl", &chat());
    let token = place.token("user-0");
    let served = place.serve(&[]);
    let mut migrating = place.command(&["admin", "list"]);
    migrating.envs(Release::Next.variables().iter().copied());
    let migrated = on_thread(move || migrating.output().expect("it runs")).await;
    assert!(migrated.status.success(), "{migrated:?}");

    let late = place.run(&["admin", "list"]);
    assert_eq!(late.code, Some(1), "{late:?}");
    assert!(late.err.contains("written by a newer ibid"), "{late:?}");
    let made = served.post(&token, "k", &json!({"scope": "all"})).await;
    let done = served.wait(&token, &made.text("job_id"), is_done).await;
    assert_eq!(done["messages"], MESSAGES);
    let (code, _) = on_thread(|| served.process.terminate()).await;
    assert_eq!(code, Some(0));
}
