//! The claim loop: takes jobs, keeps their leases alive, and reports how they ended.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::export::{Event, Export, LONGEST_WAIT, Problem, State, Terms, Waiting};
use crate::failpoint::failpoint;
use crate::ids::JobId;
use crate::janitor;
use crate::ledger::{Claim, LedgerError, Offer};
use crate::segment::EncoderId;
use crate::time::Time;
use crate::work::{Tally, WorkError, Worked, Workshop};

/// How a worker takes jobs.
#[derive(Clone, Copy, Debug)]
pub struct WorkerTerms {
    /// Jobs at the same time.
    pub workers: usize,
    pub lease: Duration,
    /// How long an idle worker waits before it looks again.
    pub poll: Duration,
    pub terms: Terms,
    /// Jobs of one user at the same time; 0 means no limit.
    pub running_per_user: u64,
    /// Ends when there is nothing left to do, instead of waiting for more.
    pub until_idle: bool,
}

/// How one attempt at a job ended.
#[derive(Clone, Debug, serde::Serialize)]
pub struct AttemptReport {
    pub job_id: JobId,
    pub attempt: u32,
    /// The job's state after the attempt; `None` if another worker has it now.
    pub state: Option<State>,
    pub parts_written: u64,
    pub parts_kept: u64,
    pub messages: Option<u64>,
    pub bytes: Option<u64>,
    pub sha256: Option<String>,
    /// From the creation of the job until it was done.
    pub seconds: Option<f64>,
    pub error: Option<Problem>,
}

/// How often a worker that is to end when idle looks at a ledger that does not answer.
const MOST_FAILURES: u32 = 5;

/// Of how many jobs at a time it is told that they are left alone.
const PASSED_OVER: u32 = 100;

/// Takes jobs and works on them.
pub struct Worker {
    workshop: Workshop,
    terms: WorkerTerms,
    /// Told when a job was created in this process, so that it does not wait for the poll.
    wake: Arc<Notify>,
    report: Box<dyn Fn(AttemptReport) + Send + Sync>,
}

impl Worker {
    pub fn new(
        workshop: Workshop,
        terms: WorkerTerms,
        wake: Arc<Notify>,
        report: impl Fn(AttemptReport) + Send + Sync + 'static,
    ) -> Worker {
        Worker {
            workshop,
            terms,
            wake,
            report: Box::new(report),
        }
    }

    /// Works until `stop`: then no job is taken any more, parts in hand are finished, and
    /// leases are given back.
    ///
    /// # Errors
    /// Only of a worker that is to end when idle: the ledger has not answered for several looks, or
    /// must not be used as it is.
    pub async fn run(&self, stop: &CancellationToken) -> Result<(), LedgerError> {
        let loops = (0..self.terms.workers).map(|_| self.claim_loop(stop));
        futures::future::try_join_all(loops).await.map(drop)
    }

    async fn claim_loop(&self, stop: &CancellationToken) -> Result<(), LedgerError> {
        let mut failures = 0;
        let mut passed_over_at = None;
        while !stop.is_cancelled() {
            let woken = self.wake.notified();
            match self.claim().await {
                Ok(Some(claim)) => {
                    failures = 0;
                    let report = self.attempt(claim, stop).await;
                    (self.report)(report);
                    continue;
                }
                Ok(None) => {
                    failures = 0;
                    self.pass_over(&mut passed_over_at).await;
                    if self.terms.until_idle {
                        return Ok(());
                    }
                }
                Err(error)
                    if self.terms.until_idle
                        && (failures >= MOST_FAILURES
                            || matches!(error, LedgerError::Unusable(_))) =>
                {
                    return Err(error);
                }
                Err(error) => {
                    failures += 1;
                    tracing::warn!(%error, "no export can be taken; trying again");
                }
            }
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = woken => {}
                () = tokio::time::sleep(self.terms.poll) => {}
            }
        }
        Ok(())
    }

    /// Says of the jobs that this worker leaves alone because of their encoder that it does, but
    /// not of those that another one has had no time to take, and not at every look.
    async fn pass_over(&self, passed_over_at: &mut Option<Instant>) {
        let patience = self.terms.lease;
        if passed_over_at.is_some_and(|at| at.elapsed() < patience) {
            return;
        }
        *passed_over_at = Some(Instant::now());
        let ledger = &self.workshop.ledger;
        match ledger.pass_over(&encoders(), patience, PASSED_OVER).await {
            Ok(jobs) => {
                for job in jobs {
                    tracing::warn!(%job, "left alone: this version does not have its encoder");
                }
            }
            Err(error) => tracing::warn!(%error, "what is left alone could not be told"),
        }
    }

    async fn claim(&self) -> Result<Option<Claim>, LedgerError> {
        let offer = Offer {
            encoders: encoders(),
            lease: self.terms.lease,
            terms: self.terms.terms,
            running_per_user: self.terms.running_per_user,
        };
        self.workshop.ledger.claim(offer).await
    }

    /// One attempt, with its lease kept alive beside it.
    async fn attempt(&self, claim: Claim, stop: &CancellationToken) -> AttemptReport {
        let tally = Arc::new(Tally::default());
        let job = claim.export.job_id;
        tracing::info!(%job, attempt = claim.export.attempts, "export claimed");
        failpoint!("attempt.claimed");
        let worked = tokio::select! {
            worked = self.workshop.run(&claim, stop, &tally) => worked,
            lost = self.keep_lease(&claim) => Err(lost),
        };
        failpoint!("attempt.worked");
        let (settled, error) = self.settle(&claim, worked, stop).await;
        failpoint!("attempt.tidied");
        let artefact = settled
            .as_ref()
            .filter(|export| export.state == State::Done)
            .and_then(|export| export.artefact.clone());
        let seconds = settled
            .as_ref()
            .filter(|export| export.state == State::Done)
            .and_then(|export| Some(export.created_at.until(export.finished_at?).as_secs_f64()));
        let report = AttemptReport {
            seconds,
            job_id: job,
            attempt: claim.export.attempts,
            state: settled.map(|export| export.state),
            parts_written: tally.parts_written.load(Ordering::SeqCst),
            parts_kept: tally.parts_kept.load(Ordering::SeqCst),
            messages: artefact.as_ref().map(|artefact| artefact.messages),
            bytes: artefact.as_ref().map(|artefact| artefact.bytes),
            sha256: artefact
                .as_ref()
                .map(|artefact| hex::encode(artefact.sha256)),
            error,
        };
        tracing::info!(
            %job,
            attempt = report.attempt,
            state = report.state.map_or("lost", State::as_str),
            parts_written = report.parts_written,
            parts_kept = report.parts_kept,
            error = report.error.as_ref().map(|e| e.kind.as_str()),
            "attempt ended"
        );
        report
    }

    /// Renews the lease until it is lost, or nobody answers until it ends; says which.
    async fn keep_lease(&self, claim: &Claim) -> WorkError {
        let mut last = "it took too long".to_owned();
        let mut deadline = Instant::now() + self.terms.lease;
        let mut pulse = tokio::time::interval(self.terms.lease / 3);
        pulse.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        pulse.tick().await;
        loop {
            pulse.tick().await;
            let asked = Instant::now();
            let ledger = &self.workshop.ledger;
            let renewal = ledger.renew(claim.export.job_id, claim.id, self.terms.lease);
            match tokio::time::timeout_at(deadline, renewal).await {
                Ok(Ok(())) => {
                    failpoint!("lease.renewed");
                    deadline = asked + self.terms.lease;
                }
                Ok(Err(LedgerError::LeaseLost)) => return WorkError::LeaseLost,
                Ok(Err(error)) => {
                    tracing::warn!(%error, "the lease could not be renewed yet");
                    last = error.to_string();
                }
                Err(_) => {}
            }
            if Instant::now() >= deadline {
                return LedgerError::Unavailable(last).into();
            }
        }
    }

    /// Tells the ledger how the attempt ended; gives the job as it is then, if it is still
    /// this worker's, and the error.
    ///
    /// A ledger that does not answer is told when it does: what stopped the work is often that it
    /// is away, and a lease that lapses instead counts as an attempt, and an artefact that is whole
    /// would be made once more.
    async fn settle(
        &self,
        claim: &Claim,
        worked: Result<Worked, WorkError>,
        stop: &CancellationToken,
    ) -> (Option<Export>, Option<Problem>) {
        let job = claim.export.job_id;
        let error = match &worked {
            Ok(_) => None,
            Err(WorkError::LeaseLost) => {
                self.tidy(job).await;
                return (None, None);
            }
            Err(
                WorkError::Retry(problem)
                | WorkError::Hindered(problem)
                | WorkError::GiveUp(problem),
            ) => Some(problem.clone()),
        };
        let mut failures = 0;
        let settled = loop {
            let failed = match self.tell(claim, &worked).await {
                Ok(export) => break Some(export),
                Err(LedgerError::LeaseLost) if failures > 0 => break self.heard(claim).await,
                Err(failed) => failed,
            };
            failures += 1;
            let passes = matches!(
                failed,
                LedgerError::Unavailable(_) | LedgerError::Unusable(_)
            );
            if failures == 1 || !passes {
                tracing::warn!(%job, error = %failed, "the end of the attempt is not recorded");
            }
            // The lease lapses then, and the next worker goes on from what is recorded.
            let enough = self.terms.until_idle && failures > MOST_FAILURES;
            if !passes || enough {
                break None;
            }
            let pause = tokio::time::sleep(self.terms.poll);
            if stop.run_until_cancelled(pause).await.is_none() {
                break None;
            }
        };
        failpoint!("attempt.settled");
        self.tidy(job).await;
        (settled, error)
    }

    /// The job, if the ledger had heard that it was done, and its answer was lost.
    async fn heard(&self, claim: &Claim) -> Option<Export> {
        let found = self.workshop.ledger.find(claim.export.job_id).await;
        let export = found.ok()??.export;
        let made = export.artefact.as_ref();
        made.is_some_and(|made| made.claim == claim.id)
            .then_some(export)
    }

    /// Tells the ledger once.
    async fn tell(
        &self,
        claim: &Claim,
        worked: &Result<Worked, WorkError>,
    ) -> Result<Export, LedgerError> {
        let (ledger, terms) = (&self.workshop.ledger, self.terms.terms);
        let event = match worked {
            Ok(Worked::Whole(artefact)) => Event::Finished {
                artefact: artefact.clone(),
                terms,
            },
            Ok(Worked::Stopped) => Event::GivenBack,
            Err(WorkError::LeaseLost) => return Err(LedgerError::LeaseLost),
            Err(WorkError::Retry(problem)) => Event::Faltered {
                problem: problem.clone(),
                retry_at: ledger.now().await?.plus(backoff(claim.export.strikes)),
                terms,
            },
            Err(WorkError::Hindered(problem)) => {
                let now = ledger.now().await?;
                Event::Hindered {
                    problem: problem.clone(),
                    retry_at: now.plus(patience(claim.export.waiting.as_ref(), now)),
                }
            }
            Err(WorkError::GiveUp(problem)) => Event::GaveUp {
                problem: problem.clone(),
                terms,
            },
        };
        ledger.settle(claim.export.job_id, claim.id, event).await
    }

    /// Deletes what the ledger does not name: parts that went into the artefact, what an attempt
    /// wrote that was overtaken, everything of a job that was withdrawn meanwhile.
    async fn tidy(&self, job: JobId) {
        let workshop = &self.workshop;
        let tidied = janitor::tidy(workshop.ledger.as_ref(), &workshop.vault, job).await;
        if let Err(error) = tidied {
            tracing::warn!(%job, %error, "what is not needed could not be deleted yet");
        }
    }
}

fn encoders() -> Vec<String> {
    let all = EncoderId::all().iter();
    all.map(|encoder| encoder.as_str().to_owned()).collect()
}

/// How long to wait before attempt after attempt: 1 s, 2 s, 4 s .. 60 s, less a random share, so
/// that many workers do not come back at the same moment.
fn backoff(strikes: u32) -> Duration {
    jitter(Duration::from_secs(1 << strikes.min(6)).min(LONGEST_WAIT))
}

/// How long to wait for something that is to pass: as long as it has lasted, up to 60 s.
fn patience(waiting: Option<&Waiting>, now: Time) -> Duration {
    let lasted = waiting.map_or(Duration::ZERO, |waiting| waiting.since.until(now));
    jitter(lasted.clamp(Duration::from_secs(1), LONGEST_WAIT))
}

/// Between half of `full` and all of it.
fn jitter(full: Duration) -> Duration {
    let mut noise = [0; 1];
    // Without random numbers all wait the whole time, which is no worse than late.
    let share = match getrandom::fill(&mut noise) {
        Ok(()) => u32::from(noise[0]),
        Err(_) => 255,
    };
    full / 2 + full / 2 * share / 255
}
