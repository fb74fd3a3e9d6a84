//! Workers that are paused until others have done their jobs, and go on.

use std::time::Duration;

use ibid::export::Export;
use ibid::failpoint::Deed;
use ibid::ids::JobId;
use rustix::process::Signal;
use tokio::time::{sleep, timeout};

use super::{FIXED, PATIENCE, Rig, WORKER};
use crate::crash::process::Process;

/// Where they are paused until another worker has done the job: all before its end is recorded.
const BEFORE_THE_END: [&str; 11] = [
    "attempt.claimed",
    "part.encoded",
    "part.put",
    "part.recorded",
    "upload.before",
    "upload.begun",
    "upload.noted",
    "piece.before",
    "upload.sent",
    "upload.finished",
    "attempt.worked",
];

impl Rig {
    /// Pauses workers in the middle of their jobs until others have done them, and lets them go
    /// on: that changes nothing. For some the ledger is one that has forgotten their claims, so
    /// that another attempt has their number.
    pub(super) async fn overtake_workers(&mut self) {
        self.let_all_end().await;
        let mut jobs = Vec::new();
        for _ in 0..3 {
            jobs.push(self.ask(FIXED[0].0).await);
        }
        let mut paused = Vec::new();
        for _ in 0..jobs.len() {
            let name = BEFORE_THE_END[self.random.below(BEFORE_THE_END.len() as u64) as usize];
            let passes = match name {
                "part.encoded" | "part.put" | "part.recorded" => self.random.below(5),
                _ => 0,
            };
            let mut arguments = WORKER;
            // Long enough that all stand before the first lease ends.
            arguments[3] = "3";
            paused.push(self.start(&arguments, Some((name, passes, Deed::StandsStill))));
        }
        let all_stand = async {
            while !paused.iter().all(Process::stands_still) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        // One that was too late has taken another's job and does not come to its point; nor does
        // one that waits for the lock that another stands still with, which nobody waits for long.
        if timeout(Duration::from_secs(10), all_stand).await.is_err() {
            return;
        }
        let each_holds_one = |export: &Export| {
            let held = export.lease.is_some();
            held && export.attempts == 1
        };
        if !self.find(&jobs).await.iter().all(each_holds_one) {
            // The machine was too slow.
            return;
        }
        // The renewal of one may stand inside its transaction, and hold a lock.
        let lock = self
            .home
            .change("UPDATE export SET due_at = due_at WHERE state = 'running'");
        if timeout(Duration::from_secs(5), lock).await.is_err() {
            return;
        }
        for job in &jobs {
            if self.random.below(2) == 0 {
                self.jobs.get_mut(job).expect("it is known").forgotten = true;
                self.recorded.retain(|(of, _), _| *of != job.to_string());
                self.home
                    .change(&format!("DELETE FROM part WHERE job_id = '{job}'"))
                    .await;
                let forget = format!(
                    "UPDATE export SET state = 'queued', claim = NULL, lease_until = NULL,
                            attempts = attempts - 1
                     WHERE job_id = '{job}' AND state = 'running'"
                );
                self.home.change(&forget).await;
            }
        }
        self.let_all_end().await;
        let before = self.find(&jobs).await;
        for process in &paused {
            process.signal(Signal::CONT);
        }
        for mut process in paused {
            let reported = async {
                while process.reports().is_empty() {
                    sleep(Duration::from_millis(5)).await;
                }
            };
            if timeout(PATIENCE, reported).await.is_err() {
                self.tally.stuck.push("an overtaken worker".to_owned());
            }
            self.ends(&mut process).await;
            if let Some(report) = process.reports().first() {
                let job = report["job_id"].as_str().and_then(JobId::parse);
                let job = before.iter().find(|export| Some(export.job_id) == job);
                self.tally.overtaken += 1;
                match job {
                    Some(job) if report["state"].is_null() => {
                        let came_back = report["attempt"] == job.attempts;
                        self.tally.came_back += u64::from(came_back);
                    }
                    _ => self.wrong(format!("an overtaken worker says {report}")),
                }
            }
            self.take_reports(&process);
        }
        let after = self.find(&jobs).await;
        if before != after {
            self.wrong(format!("overtaken workers made {after:?} of {before:?}"));
        }
    }

    async fn find(&self, jobs: &[JobId]) -> Vec<Export> {
        let mut found = Vec::new();
        for job in jobs {
            let export = self.home.exporter.ledger.find(*job).await;
            let export = export.expect("the ledger answers").expect("it is there");
            found.push(export.export);
        }
        found
    }
}
