//! Rounds on one installation: workers that die while exports are made, workers that are
//! overtaken, a look at everything, sweeps that die.

mod look;
mod overtaking;
mod sweeps;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use base64::Engine as _;
use ibid::failpoint::Deed;
use ibid::ids::JobId;
use rustix::process::Signal;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::home::{Home, Kept, append, user_id};
use super::process::Process;
use super::{Random, Tally};
use crate::harness::{event, join, message};

/// Whose conversations do not change, so that it is known what their exports are.
const FIXED: [(&str, u64); 2] = [("fixed-long", 200), ("fixed-short", 45)];

/// One whose artefact is sent to an object store in pieces.
const LARGE: &str = "fixed-large";

/// Who talks while exports are made.
const TALKERS: u64 = 3;

/// Workers at the same time that are killed again and again.
const WORKERS: usize = 4;

/// Unfinished jobs, so that there is work although those of the dead wait for their lease.
const UNFINISHED: u64 = 14;

const WORKER: [&str; 8] = [
    "worker",
    "--json",
    "--lease-seconds",
    "1",
    "--max-attempts",
    "1000000",
    "--running-per-user",
    "0",
];

/// Where workers are killed.
const OF_ATTEMPTS: [&str; 20] = [
    "claim.locked",
    "attempt.claimed",
    "part.encoded",
    "part.put",
    "part.recorded",
    "upload.before",
    "upload.begun",
    "upload.noted",
    "piece.before",
    "piece.sent",
    "upload.sent",
    "upload.finished",
    "attempt.worked",
    "attempt.settled",
    "tidy.listed",
    "tidy.read",
    "delete.object",
    "delete.deleted",
    "attempt.tidied",
    "lease.renewed",
];

/// How long everything may take that goes on by itself.
const PATIENCE: Duration = Duration::from_secs(90);

struct Job {
    user: String,
    withdrawn: bool,
    /// The ledger has forgotten attempts, so their parts are written again.
    forgotten: bool,
}

/// A worker that will be killed.
struct Doomed {
    process: Process,
    fate: Fate,
}

enum Fate {
    /// It kills itself; if it does not come to the point, it is killed.
    AtPoint(&'static str, Instant),
    At(Instant),
    /// Paused from one instant to the other.
    Paused(Instant, Instant),
    /// Paused, and goes on at this instant.
    Stands(Instant),
}

pub struct Rig {
    pub tally: Tally,
    home: Home,
    random: Random,
    /// The digests of the undisturbed exports of those whose conversations do not change.
    undisturbed: BTreeMap<String, String>,
    jobs: BTreeMap<JobId, Job>,
    reports: BTreeMap<String, Vec<Value>>,
    /// Under which claim a recorded part was first seen: it stays there.
    recorded: BTreeMap<(String, String), String>,
    processes: u64,
    next_point: usize,
    keys: u64,
    rounds: u64,
}

impl Rig {
    pub async fn open(kept: Kept, mut random: Random) -> Option<Rig> {
        let home = Home::start(kept).await?;
        let mut log = Vec::new();
        for (user, messages) in FIXED {
            log.push(join(user, user));
            log.extend((0..messages).map(|n| message(user, &format!("{user} says {n}"))));
        }
        let mut users: Vec<&str> = FIXED.iter().map(|(user, _)| *user).collect();
        if home.store.is_some() {
            log.push(join(LARGE, LARGE));
            log.extend((0..300).map(|n| message(LARGE, &noise(n))));
            users.push(LARGE);
        }
        home.append(&log).await;
        let calm = Home::start(Kept::SqliteAndDisk).await?;
        calm.append(&log).await;
        let mut undisturbed = BTreeMap::new();
        for user in users {
            calm.ask(user, "all", user).await;
            let mut worker = calm.command(&["worker", "--until-idle", "--json"]);
            let out = worker.output().expect("it runs").stdout;
            let report: Value = serde_json::from_slice(&out).expect("one report");
            let sha256 = report["sha256"].as_str().expect("it is done");
            undisturbed.insert(user.to_owned(), sha256.to_owned());
        }
        let next_point = random.below(OF_ATTEMPTS.len() as u64) as usize;
        Some(Rig {
            tally: Tally::default(),
            home,
            random,
            undisturbed,
            jobs: BTreeMap::new(),
            reports: BTreeMap::new(),
            recorded: BTreeMap::new(),
            processes: 0,
            next_point,
            keys: 0,
            rounds: 0,
        })
    }

    /// Gives the tally; the folder of an installation with faults is kept.
    pub fn end(mut self) -> Tally {
        if self.tally.faults().next().is_some() {
            self.home.place.folder.disable_cleanup(true);
            let folder = self.home.place.folder.path();
            eprintln!("kept: {}", folder.display());
        }
        self.tally
    }

    /// Kills until the tally has come to `goal`, lets all end, and looks at everything.
    pub async fn round(&mut self, goal: u64) {
        self.rounds += 1;
        let round = self.rounds;
        let convs: Vec<String> = (0..TALKERS).map(|n| format!("talk-{round}-{n}")).collect();
        let joins: Vec<_> = convs.iter().map(|conv| join(conv, conv)).collect();
        self.home.append(&joins).await;
        let stop = CancellationToken::new();
        let exporter = self.home.exporter.clone();
        let talking = tokio::spawn({
            let (stop, convs) = (stop.clone(), convs.clone());
            async move {
                let mut lines = 0;
                while !stop.is_cancelled() {
                    append(&exporter, &talk(&convs, lines)).await;
                    lines += 1;
                    sleep(Duration::from_millis(15)).await;
                }
            }
        });
        let janitor = self.home.exporter.janitor(Duration::from_secs(86_400));
        let sweeping = tokio::spawn({
            let stop = stop.clone();
            async move {
                while !stop.is_cancelled() {
                    janitor.sweep_all().await.expect("swept");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        });
        self.kill_workers(goal, &convs).await;
        self.overtake_workers().await;
        stop.cancel();
        talking.await.expect("the writer writes");
        sweeping.await.expect("the janitor sweeps");
        self.let_all_end().await;
        self.look().await;
        if self.tally.faults().next().is_none() {
            self.kill_sweeps().await;
        }
    }

    async fn kill_workers(&mut self, goal: u64, convs: &[String]) {
        let mut doomed: Vec<Doomed> = Vec::new();
        while self.tally.kills() < goal {
            self.feed(convs).await;
            while doomed.len() < WORKERS {
                doomed.push(self.doom());
            }
            let mut alive = Vec::new();
            for worker in doomed {
                alive.extend(self.tend(worker));
            }
            doomed = alive;
            self.note_parts().await;
            sleep(Duration::from_millis(10)).await;
        }
        for mut worker in doomed {
            worker.process.kill();
            self.tally.at_random += 1;
            self.take_reports(&worker.process);
        }
    }

    /// Sees to it that there is work, and withdraws some.
    async fn feed(&mut self, convs: &[String]) {
        let unfinished = self.unfinished().await;
        if unfinished == 0 && self.home.store.is_some() {
            self.ask(LARGE).await;
        }
        for _ in unfinished..UNFINISHED {
            let user = match self.random.below(4) {
                0 => FIXED[0].0,
                1 => FIXED[1].0,
                _ => &convs[self.random.below(TALKERS) as usize],
            };
            let job = self.ask(user).await;
            if self.random.below(10) == 0 {
                let (&job, user) = match self.jobs.range(..job).next_back() {
                    Some((job, it)) if it.user != LARGE => (job, it.user.clone()),
                    _ => continue,
                };
                let withdrawn = self.home.exporter.withdraw(&user_id(&user), job).await;
                withdrawn.expect("the ledger answers");
                self.jobs.get_mut(&job).expect("it is known").withdrawn = true;
            }
        }
    }

    async fn ask(&mut self, user: &str) -> JobId {
        self.keys += 1;
        let key = self.keys.to_string();
        let job = self.home.ask(user, "all", &key).await;
        self.tally.jobs += 1;
        let user = user.to_owned();
        let asked = Job {
            user,
            withdrawn: false,
            forgotten: false,
        };
        self.jobs.insert(job, asked);
        job
    }

    async fn unfinished(&self) -> u64 {
        let unfinished = "export WHERE state IN ('queued', 'running')";
        self.home.count(unfinished).await
    }

    fn doom(&mut self) -> Doomed {
        let now = Instant::now();
        let after = |millis| now + Duration::from_millis(millis);
        let mut point = None;
        let fate = match self.random.below(20) {
            0..=2 => Fate::At(after(20 + self.random.below(600))),
            3 => {
                let from = 50 + self.random.below(400);
                // Longer than its lease, or just about that.
                let until = from + 900 + self.random.below(1500);
                Fate::Paused(after(from), after(until))
            }
            _ => {
                let name = self.next_point();
                let passes = match name {
                    "lease.renewed" => 0,
                    "part.encoded" | "part.put" | "part.recorded" => self.random.below(9),
                    _ => self.random.below(2),
                };
                point = Some((name, passes, Deed::Dies));
                Fate::AtPoint(name, after(1500))
            }
        };
        let process = self.start(&WORKER, point);
        Doomed { process, fate }
    }

    fn next_point(&mut self) -> &'static str {
        loop {
            let name = OF_ATTEMPTS[self.next_point];
            self.next_point = (self.next_point + 1) % OF_ATTEMPTS.len();
            if self.is_passed(name) {
                return name;
            }
        }
    }

    /// Whether anybody here comes to this point: users are locked in PostgreSQL only, folders are
    /// deleted on a disk only, and only in an object store uploads are given up.
    fn is_passed(&self, name: &str) -> bool {
        match self.home.kept {
            Kept::SqliteAndDisk => name != "claim.locked" && !name.starts_with("give-up."),
            Kept::PostgresAndDisk => !name.starts_with("give-up."),
            Kept::PostgresAndS3 => name != "delete.deleted",
        }
    }

    fn start(&mut self, arguments: &[&str], point: Option<(&str, u64, Deed)>) -> Process {
        self.processes += 1;
        Process::start(&self.home, self.processes, arguments, point)
    }

    /// Does to a worker what is due; gives it back while it lives.
    fn tend(&mut self, mut worker: Doomed) -> Option<Doomed> {
        let now = Instant::now();
        if let Some(status) = worker.process.ended() {
            self.take_reports(&worker.process);
            match worker.fate {
                Fate::AtPoint(name, _) if is_killed(status) => self.killed_at(name),
                _ => self.wrong(format!("a worker ended by itself: {status}")),
            }
            return None;
        }
        match worker.fate {
            Fate::AtPoint(_, at) | Fate::At(at) if now >= at => {
                worker.process.kill();
                self.take_reports(&worker.process);
                self.tally.at_random += 1;
                return None;
            }
            Fate::Paused(from, until) if now >= from => {
                worker.process.signal(Signal::STOP);
                worker.process.goes_on_at(until);
                worker.fate = Fate::Stands(until);
            }
            Fate::Stands(until) if now >= until => {
                self.tally.pauses += 1;
                let life = Duration::from_millis(100 + self.random.below(500));
                worker.fate = Fate::At(now + life);
            }
            Fate::AtPoint(..) | Fate::At(_) | Fate::Paused(..) | Fate::Stands(_) => {}
        }
        Some(worker)
    }

    fn killed_at(&mut self, name: &'static str) {
        *self.tally.at_points.entry(name).or_default() += 1;
    }

    fn take_reports(&mut self, process: &Process) {
        for report in process.last_reports() {
            let job = report["job_id"].as_str().expect("a job").to_owned();
            self.reports.entry(job).or_default().push(report);
        }
    }

    /// Lets workers that nobody disturbs do what is left.
    async fn let_all_end(&mut self) {
        if self.unfinished().await == 0 {
            return;
        }
        let arguments = [&WORKER[..], &["--workers", "2"]].concat();
        let workers = [self.start(&arguments, None), self.start(&arguments, None)];
        let begun = Instant::now();
        while self.unfinished().await > 0 && begun.elapsed() < PATIENCE {
            self.note_parts().await;
            sleep(Duration::from_millis(20)).await;
        }
        let unfinished = "SELECT job_id, user_id, state, CAST(attempts AS text),
                                 coalesce(waiting_type, '')
                          FROM export WHERE state IN ('queued', 'running')";
        for row in self.home.rows(unfinished).await {
            self.tally.stuck.push(self.at_home(&row.join(" ")));
        }
        for mut worker in workers {
            self.ends(&mut worker).await;
            self.take_reports(&worker);
        }
    }

    /// Asks a process to end, which it must do in good order.
    async fn ends(&mut self, process: &mut Process) {
        process.signal(Signal::TERM);
        match self.wait(process).await {
            Some(status) if status.success() => {}
            // It had not begun yet.
            Some(status) if is_killed_by(status, Signal::TERM) && process.reports().is_empty() => {}
            Some(status) => self.wrong(format!("told to end, a worker did with {status}")),
            None => self
                .tally
                .stuck
                .push("a worker that was told to end".to_owned()),
        }
    }

    async fn wait(&mut self, process: &mut Process) -> Option<ExitStatus> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = process.ended() {
                return Some(status);
            }
            sleep(Duration::from_millis(5)).await;
        }
        None
    }

    fn wrong(&mut self, what: String) {
        let what = self.at_home(&what);
        self.tally.wrong.push(what);
    }

    fn at_home(&self, what: &str) -> String {
        format!("{}, round {}: {what}", self.home.kept.as_str(), self.rounds)
    }
}

fn is_killed(status: ExitStatus) -> bool {
    is_killed_by(status, Signal::KILL)
}

fn is_killed_by(status: ExitStatus, signal: Signal) -> bool {
    status.signal() == Some(signal.as_raw())
}

/// Some lines of whoever talks: every one says something, and some change what they said first.
fn talk(convs: &[String], number: u64) -> Vec<String> {
    let mut lines = Vec::new();
    for conv in convs {
        lines.push(message(conv, &format!("{number} of {conv}")));
        lines.push(message(conv, &format!("{number} again")));
        if number.is_multiple_of(3) {
            let seq = 1 + number / 2;
            lines.push(event(
                json!({"kind": "edit", "conv": conv, "seq": seq, "body": format!("once {number}")}),
            ));
        }
    }
    lines
}

/// Forty kilobytes that do not compress to less than three quarters.
fn noise(number: u64) -> String {
    let digests = (0..900_u64).flat_map(|n| Sha256::digest((number * 900 + n).to_be_bytes()));
    let bytes: Vec<u8> = digests.collect();
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
