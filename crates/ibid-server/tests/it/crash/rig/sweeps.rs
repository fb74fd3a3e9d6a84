//! Sweeps that die.

use std::time::Duration;

use ibid::export::{Event, RevokedBy};
use ibid::failpoint::Deed;
use ibid::ids::{ClaimId, JobId};
use ibid::vault::Key;

use super::{Rig, is_killed};

/// Where sweeps are killed, in this order: each leaves work for the next.
const OF_SWEEPS: [&str; 10] = [
    "sweep.expired",
    "tidy.listed",
    "tidy.read",
    "delete.object",
    "delete.deleted",
    "purge.tidied",
    "purge.noted",
    "give-up.before",
    "give-up.done",
    "give-up.forgotten",
];

impl Rig {
    /// Lets all jobs be withdrawn or expire, and kills the sweeps that delete their bytes.
    pub(super) async fn kill_sweeps(&mut self) {
        let ledger = self.home.exporter.ledger.clone();
        let jobs = std::mem::take(&mut self.jobs);
        for (job, asked) in &jobs {
            if asked.withdrawn || self.random.below(2) == 0 {
                let event = Event::Revoked {
                    by: RevokedBy::Owner,
                    reason: "it is over".to_owned(),
                };
                ledger.decide(*job, event).await.expect("withdrawn");
            }
        }
        if let Some(job) = jobs.keys().next() {
            self.begin_uploads(*job).await;
        }
        // Long ago, so that nobody waits for what a worker may still write.
        for long_ago in [
            "UPDATE export SET expires_at = 1 WHERE state = 'done'",
            "UPDATE export SET revoked_at = 1 WHERE state = 'revoked'",
            "UPDATE pin SET pinned_at = 1",
        ] {
            self.home.change(long_ago).await;
        }
        for name in OF_SWEEPS {
            if !self.is_passed(name) {
                continue;
            }
            let passes = match name {
                "sweep.expired" => 0,
                _ => self.random.below(2),
            };
            let mut sweep = self.start(
                &["admin", "sweep", "--json"],
                Some((name, passes, Deed::Dies)),
            );
            match self.wait(&mut sweep).await {
                Some(status) if is_killed(status) => self.killed_at(name),
                Some(status) if status.success() => {}
                Some(status) => self.wrong(format!("a sweep ended with {status}")),
                None => self.tally.stuck.push("a sweep".to_owned()),
            }
            drop(sweep);
        }
        let janitor = self.home.exporter.janitor(Duration::ZERO);
        if let Err(error) = janitor.sweep_all().await {
            self.tally
                .left_over
                .push(format!("the sweep failed: {error}"));
        }
        for object in self.home.objects().iter().filter(|it| *it != "ledger") {
            self.tally.left_over.push(self.at_home(object));
        }
        for table in ["export", "part", "export_stay", "pin"] {
            let rows = self.home.count(table).await;
            if rows > 0 {
                let what = format!("{rows} rows of {table}");
                self.tally.left_over.push(self.at_home(&what));
            }
        }
        self.look_at_uploads().await;
    }

    /// Begins uploads in an object store that nobody will finish.
    async fn begin_uploads(&mut self, job: JobId) {
        if self.home.store.is_none() {
            return;
        }
        for _ in 0..4 {
            let claim = ClaimId::random().expect("random numbers");
            let key = Key::Artefact { job, claim };
            let upload = self.home.exporter.vault.upload(key, 20 << 20).await;
            let mut upload = upload.expect("begun");
            let id = upload.id().expect("it has one").to_owned();
            upload.write(&vec![7; (8 << 20) + 1]).await.expect("sent");
            let note = format!("INSERT INTO upload VALUES ('{job}', '{claim}', '{id}')");
            self.home.change(&note).await;
        }
    }
}
