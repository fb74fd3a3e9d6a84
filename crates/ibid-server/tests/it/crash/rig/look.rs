//! A look at every job and at everything that is kept.

use std::collections::BTreeSet;
use std::time::Duration;

use ibid::export::State;
use ibid::ids::JobId;
use ibid::verify::verify;
use serde_json::Value;

use super::Rig;

impl Rig {
    /// Notes under which claims the parts are recorded.
    pub(super) async fn note_parts(&mut self) {
        let parts = "SELECT job_id, CAST(part AS text), claim FROM part WHERE job_id IN
                     (SELECT job_id FROM export WHERE state IN ('queued', 'running'))";
        for row in self.home.rows(parts).await {
            let [job, part, claim] = row.try_into().expect("three columns");
            self.note_part(job, part, claim);
        }
    }

    fn note_part(&mut self, job: String, part: String, claim: String) {
        let known = JobId::parse(&job).and_then(|id| self.jobs.get(&id));
        if known.is_some_and(|job| job.forgotten) {
            return;
        }
        let of = (job, part);
        let first = self.recorded.entry(of.clone()).or_insert(claim.clone());
        if *first != claim {
            let (job, part) = of;
            self.wrong(format!(
                "part {part} of {job} was recorded and written again"
            ));
        }
    }

    /// Looks at every job and at everything that is kept.
    pub(super) async fn look(&mut self) {
        let janitor = self.home.exporter.janitor(Duration::from_secs(86_400));
        if let Err(error) = janitor.sweep_all().await {
            self.tally
                .left_over
                .push(format!("the sweep failed: {error}"));
        }
        let mut kept = BTreeSet::from(["ledger".to_owned()]);
        let jobs: Vec<JobId> = self.jobs.keys().copied().collect();
        for job in jobs {
            if let Some(artefact) = self.look_at(job).await {
                kept.insert(artefact);
            }
        }
        let objects = self.home.objects();
        for object in objects.difference(&kept) {
            self.tally.left_over.push(self.at_home(object));
        }
        for object in kept.difference(&objects) {
            self.wrong(format!("{object} is gone"));
        }
        self.look_at_uploads().await;
        let of_none = "part WHERE job_id NOT IN (SELECT job_id FROM export)";
        if self.home.count(of_none).await > 0 {
            let what = self.at_home("parts of no job");
            self.tally.left_over.push(what);
        }
        let log = std::fs::read_to_string(self.home.place.folder.path().join("log"));
        let log = log.expect("a log");
        for line in log.lines().filter(|line| line.contains("panicked")) {
            self.wrong(line.to_owned());
        }
        self.reports.clear();
        self.recorded.clear();
    }

    pub(super) async fn look_at_uploads(&mut self) {
        let noted = self.home.count("upload").await;
        let Some(store) = &self.home.store else {
            return;
        };
        let (pieces, unfinished) = (store.pieces(), store.unfinished());
        self.tally.unheard_of = (unfinished - pieces) as u64;
        if noted > 0 || pieces > 0 {
            let what = format!("{noted} noted uploads, {pieces} pieces");
            self.tally.left_over.push(self.at_home(&what));
        }
    }

    /// Looks at one job, and gives where its artefact must be.
    async fn look_at(&mut self, job: JobId) -> Option<String> {
        let exporter = self.home.exporter.clone();
        let (ledger, source) = (exporter.ledger.as_ref(), exporter.source.as_ref());
        let found = ledger.find(job).await.expect("the ledger answers");
        let Some(found) = found else {
            self.wrong(format!("{job} is lost"));
            return None;
        };
        let (export, asked) = (found.export, &self.jobs[&job]);
        if asked.withdrawn {
            if export.state != State::Revoked {
                self.wrong(format!("{job} was withdrawn and is {:?}", export.state));
            }
            return None;
        }
        let undisturbed = self.undisturbed.get(&asked.user).cloned();
        let Some(artefact) = export.artefact.filter(|_| export.state == State::Done) else {
            let why = export.problem;
            self.wrong(format!("{job} is {:?}: {why:?}", export.state));
            return None;
        };
        let sha256 = hex::encode(artefact.sha256);
        if undisturbed.is_some_and(|undisturbed| undisturbed != sha256) {
            self.wrong(format!("{job} is not the undisturbed artefact"));
        }
        let again = verify(source, ledger, &exporter.vault, job, &mut |_, _| {}).await;
        let again = again.expect("it can be rendered");
        let same = again.artefact_equal == Some(true) && again.stored_equal == Some(true);
        if !same || again.parts_equal != again.parts || !again.parts_different.is_empty() {
            self.wrong(format!("rendered again: {again:?}"));
        }
        self.look_at_parts(job, artefact.parts).await;
        Some(format!("{job}/{}/export.jsonl.gz", artefact.claim))
    }

    /// No part is recorded twice or written again once it was recorded.
    async fn look_at_parts(&mut self, job: JobId, parts: u64) {
        let recorded =
            format!("SELECT job_id, CAST(part AS text), claim FROM part WHERE job_id = '{job}'");
        let rows = self.home.rows(&recorded).await;
        let number = |row: &Vec<String>| row[1].parse().expect("a number");
        let mut numbers: Vec<u64> = rows.iter().map(number).collect();
        numbers.sort_unstable();
        if !numbers.iter().copied().eq(0..parts) {
            self.wrong(format!("the parts of {job} are {numbers:?}"));
        }
        for row in rows {
            let [job, part, claim] = row.try_into().expect("three columns");
            self.note_part(job, part, claim);
        }
        let reports = self.reports.remove(&job.to_string()).unwrap_or_default();
        let written = |report: &Value| report["parts_written"].as_u64().expect("a number");
        let written: u64 = reports.iter().map(written).sum();
        if written > parts && !self.jobs[&job].forgotten {
            self.wrong(format!(
                "{written} parts were written of {parts}: {reports:?}"
            ));
        }
    }
}
