//! What an operator counts: `GET /metrics`, in the text format of OpenMetrics.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ibid::export::State;
use ibid::ledger::Queue;
use ibid::time::Time;
use ibid::worker::AttemptReport;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Seconds from creation to done: from what feels like at once to what is an incident.
const JOB_SECONDS: [f64; 12] = [
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0,
];

/// The media type of what [`Metrics::text`] gives.
pub const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The numbers of one process; those of the queue are of all.
pub struct Metrics {
    registry: Registry,
    job_seconds: Histogram,
    attempts: Family<Outcome, Counter>,
    parts_written: Counter,
    parts_skipped: Counter,
    lease_lost: Counter,
    downloads: Family<Status, Counter>,
    download_bytes: Counter,
    queue_depth: Family<Waits, Gauge>,
    queue_waiting: Family<For, Gauge>,
    queue_age: Gauge<f64, AtomicU64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: Ending,
}

/// How an attempt ended: the job's state after it, or `lost` if another worker has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Ending(Option<State>);

impl EncodeLabelValue for Ending {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> fmt::Result {
        self.0.map_or("lost", State::as_str).encode(encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Status {
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Waits {
    state: &'static str,
}

/// The kind of problem that is to pass, as the status of an export names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct For {
    r#type: String,
}

impl Default for Metrics {
    fn default() -> Metrics {
        let metrics = Metrics {
            registry: Registry::with_prefix("ibid"),
            job_seconds: Histogram::new(JOB_SECONDS),
            attempts: Family::default(),
            parts_written: Counter::default(),
            parts_skipped: Counter::default(),
            lease_lost: Counter::default(),
            downloads: Family::default(),
            download_bytes: Counter::default(),
            queue_depth: Family::default(),
            queue_waiting: Family::default(),
            queue_age: Gauge::default(),
        };
        metrics.registered()
    }
}

impl Metrics {
    fn registered(mut self) -> Metrics {
        let registry = &mut self.registry;
        registry.register(
            "job_seconds",
            "From the creation of an export until it was done",
            self.job_seconds.clone(),
        );
        registry.register(
            "job_attempts",
            "Attempts that ended, by the state of the export then",
            self.attempts.clone(),
        );
        registry.register(
            "parts_written",
            "Parts that were rendered and recorded",
            self.parts_written.clone(),
        );
        registry.register(
            "parts_skipped",
            "Parts of earlier attempts that were whole and kept",
            self.parts_skipped.clone(),
        );
        registry.register(
            "lease_lost",
            "Attempts that ended because another worker has the export",
            self.lease_lost.clone(),
        );
        registry.register(
            "downloads",
            "Answers to downloads, by status",
            self.downloads.clone(),
        );
        registry.register_with_unit(
            "download",
            "What was sent of artefacts",
            Unit::Bytes,
            self.download_bytes.clone(),
        );
        registry.register(
            "queue_depth",
            "Exports that are not over; waiting are those that cannot go on for now",
            self.queue_depth.clone(),
        );
        registry.register(
            "queue_waiting",
            "Exports that cannot go on for now, by the problem that is to pass",
            self.queue_waiting.clone(),
        );
        registry.register_with_unit(
            "queue_age",
            "How long the oldest queued export has been there",
            Unit::Seconds,
            self.queue_age.clone(),
        );
        self
    }

    /// Counts an attempt that has ended.
    pub fn attempt(&self, report: &AttemptReport) {
        let outcome = Ending(report.state);
        self.attempts.get_or_create(&Outcome { outcome }).inc();
        self.parts_written.inc_by(report.parts_written);
        self.parts_skipped.inc_by(report.parts_kept);
        if report.state.is_none() {
            self.lease_lost.inc();
        }
        if let Some(seconds) = report.seconds {
            self.job_seconds.observe(seconds);
        }
    }

    /// Counts the answer to a download.
    pub fn download(&self, status: u16) {
        self.downloads.get_or_create(&Status { status }).inc();
    }

    /// What counts the bytes that are sent of artefacts.
    pub fn download_bytes(&self) -> Counter {
        self.download_bytes.clone()
    }

    /// Everything, with the queue as it is `now`.
    ///
    /// # Errors
    /// Never in practice: text is written to memory.
    pub fn text(&self, queue: &Queue, now: Time) -> Result<String, fmt::Error> {
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        for (state, depth) in [
            ("queued", queue.queued),
            ("running", queue.running),
            ("waiting", queue.waiting.values().sum()),
        ] {
            let depth = number(depth);
            self.queue_depth.get_or_create(&Waits { state }).set(depth);
        }
        // What has passed is not there any more.
        self.queue_waiting.clear();
        for (kind, jobs) in &queue.waiting {
            let label = For {
                r#type: kind.clone(),
            };
            self.queue_waiting.get_or_create(&label).set(number(*jobs));
        }
        let age = queue.oldest.map_or(0.0, |at| at.until(now).as_secs_f64());
        self.queue_age.set(age);
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// Tells a worker's attempts to the metrics.
pub fn of_attempts(metrics: &Arc<Metrics>) -> impl Fn(AttemptReport) + Send + Sync + 'static {
    let metrics = Arc::clone(metrics);
    move |report| metrics.attempt(&report)
}

#[cfg(test)]
mod tests {
    use ibid::ids::JobId;

    use super::*;

    #[test]
    fn what_waits_is_told_by_its_reason_for_as_long_as_it_waits() {
        let metrics = Metrics::default();
        let now = Time::from_seconds(100);
        let waiting = [
            ("storage-full".to_owned(), 2),
            ("encoder-missing".to_owned(), 1),
        ];
        let mut queue = Queue {
            queued: 4,
            waiting: waiting.into(),
            ..Queue::default()
        };
        let text = metrics.text(&queue, now).unwrap();
        for line in [
            "ibid_queue_depth{state=\"waiting\"} 3",
            "ibid_queue_waiting{type=\"storage-full\"} 2",
            "ibid_queue_waiting{type=\"encoder-missing\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "no {line:?} in\n{text}");
        }
        queue.waiting.clear();
        let text = metrics.text(&queue, now).unwrap();
        assert!(!text.contains("ibid_queue_waiting{"), "{text}");
    }

    #[test]
    fn attempts_are_counted_by_how_they_ended() {
        let metrics = Arc::new(Metrics::default());
        let tell = of_attempts(&metrics);
        for (state, seconds) in [
            (Some(State::Done), Some(0.3)),
            (Some(State::Done), Some(20.0)),
            (Some(State::Queued), None),
            (None, None),
        ] {
            tell(AttemptReport {
                job_id: JobId::from_bytes([1; 16]),
                attempt: 1,
                state,
                parts_written: 3,
                parts_kept: 2,
                messages: None,
                bytes: None,
                sha256: None,
                seconds,
                error: None,
            });
        }
        let now = Time::from_seconds(100);
        let text = metrics.text(&Queue::default(), now).unwrap();
        for line in [
            "ibid_job_attempts_total{outcome=\"done\"} 2",
            "ibid_job_attempts_total{outcome=\"queued\"} 1",
            "ibid_job_attempts_total{outcome=\"lost\"} 1",
            "ibid_parts_written_total 12",
            "ibid_parts_skipped_total 8",
            "ibid_lease_lost_total 1",
            "ibid_job_seconds_count 2",
            "ibid_job_seconds_bucket{le=\"0.5\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "no {line:?} in\n{text}");
        }
    }
}
