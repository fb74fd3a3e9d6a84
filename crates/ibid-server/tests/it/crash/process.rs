//! A process that is killed, and what it said before.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};

use ibid::failpoint::Deed;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::Value;
use tokio::time::{Instant, sleep_until};

use super::home::Home;

pub struct Process {
    child: Child,
    out: PathBuf,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Starts the program, which does `deed` to itself at a point, if one is given.
    pub fn start(
        home: &Home,
        number: u64,
        arguments: &[&str],
        point: Option<(&str, u64, Deed)>,
    ) -> Process {
        let folder = home.place.folder.path();
        let out = folder.join(format!("out-{number}"));
        let mut command = home.command(arguments);
        if let Some((name, passes, deed)) = point {
            let point = format!("{name}:{passes}:{}", deed.as_str());
            command.env("IBID_TEST_FAILPOINT", point);
        }
        command.env("IBID_LOG", "warn");
        command.stdout(File::create(&out).expect("a file"));
        command.stderr(log(folder));
        let child = command.spawn().expect("it runs");
        Process { child, out }
    }

    pub fn signal(&self, signal: Signal) {
        // One that has just ended is a zombie of the system's until it is waited for.
        kill_process(Pid::from_child(&self.child), signal).expect("told");
    }

    /// Lets one that stands still go on at that instant, whatever else is waited for: it may hold
    /// the lock that the rig needs to go on itself.
    pub fn goes_on_at(&self, instant: Instant) {
        let process = Pid::from_child(&self.child);
        tokio::spawn(async move {
            sleep_until(instant).await;
            // It may have been killed meanwhile.
            let _ = kill_process(process, Signal::CONT);
        });
    }

    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is ours")
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }

    pub fn stands_still(&self) -> bool {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(Pid::from_child(&self.child)), options);
        status.is_ok_and(|status| status.is_some_and(|status| status.stopped()))
    }

    /// The attempts that it has reported.
    pub fn reports(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.out).expect("its output");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("a report"))
            .collect()
    }

    /// As [`Process::reports`], once it has ended: its output is deleted.
    pub fn last_reports(&self) -> Vec<Value> {
        let reports = self.reports();
        std::fs::remove_file(&self.out).expect("its output");
        reports
    }
}

/// What all processes of an installation say besides.
fn log(folder: &Path) -> File {
    let mut options = File::options();
    let options = options.create(true).append(true);
    options.open(folder.join("log")).expect("a file")
}
