//! `ibid worker`: workers and nothing else.

use std::sync::Arc;

use clap::Args;
use ibid::export::{State, Terms};
use ibid::janitor::Janitor;
use ibid::worker::{AttemptReport, Worker, WorkerTerms};
use tokio_util::sync::CancellationToken;

use super::{Failure, bind_metrics, complain, load, open, say, unavailable};
use crate::api::Watched;
use crate::config::{Settings, StoreFlags, WorkFlags};
use crate::lifecycle::watch;
use crate::metrics::{Metrics, of_attempts};
use crate::signals;

/// Work on exports, without the API
///
/// Takes queued exports and those whose worker was lost, until SIGTERM or SIGINT; then the part
/// in hand is finished and the export given back. Any number of workers can run beside a server.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ibid worker --workers 2
  ibid worker --until-idle --json
  ibid worker --metrics-listen 127.0.0.1:9100    with /metrics, /healthz and /readyz there")]
pub struct WorkerArgs {
    /// End when there is nothing left to do
    #[arg(long)]
    until_idle: bool,
    /// Stand still once so many parts were written
    #[arg(long, hide = true, value_name = "N")]
    hold_after_parts: Option<u64>,
    /// Print a JSON line for each attempt
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreFlags,
    #[command(flatten)]
    work: WorkFlags,
}

/// Works until there is nothing left or a signal asks to stop.
///
/// # Errors
/// The configuration or the store cannot be used, or the time to drain was too short.
pub async fn run(args: WorkerArgs) -> Result<(), Failure> {
    let config = load(&args.store.flags().merge(args.work.flags()))?;
    let settings = &config.settings;
    if settings.workers == 0 {
        return Err(Failure::usage(
            "workers = 0 leaves this process nothing to do; give --workers 1 or more",
        ));
    }
    let exporter = open(settings).await?;
    let stop = signals::stop_token().map_err(|e| {
        Failure::failed(format!("signals cannot be received: {e}; raise the limits"))
    })?;
    let terms = WorkerTerms {
        until_idle: args.until_idle,
        ..worker_terms(settings)
    };
    let workshop = exporter.workshop(settings.render_threads, args.hold_after_parts);
    let metrics = Arc::<Metrics>::default();
    let count = of_attempts(&metrics);
    let worker = Worker::new(workshop, terms, exporter.created(), move |report| {
        say_attempt(&report, args.json);
        count(report);
    });
    let watching = bind_metrics(settings)?.map(|(listener, text)| {
        // Each line of the output is an attempt where a program reads it.
        if args.json {
            complain(&text);
        } else {
            say(&text);
        }
        listener
    });
    let watched = Watched {
        exporter: exporter.clone(),
        metrics,
    };
    if !args.json && !args.until_idle {
        complain("Waiting for exports; end with Ctrl-C.");
    }
    let janitor = exporter.janitor(settings.record);
    tokio::select! {
        () = exporter.hear_of_jobs() => Ok(()),
        () = sweeping(&janitor, args.until_idle, &stop) => Ok(()),
        () = watch(watching, watched, &stop) => Ok(()),
        ended = worker.run(&stop) => ended.map_err(|error| unavailable(&error)),
        () = async {
            stop.cancelled().await;
            tokio::time::sleep(settings.drain).await;
        } => Err(Failure::failed(
            "the part in hand was not finished in time; its export goes on from there once its \
             lease has ended (a longer --drain-seconds avoids that)",
        )),
    }
}

/// Sweeps beside the work, and never ends by itself: one that is asked to stop waits for the work.
async fn sweeping(janitor: &Janitor, until_idle: bool, stop: &CancellationToken) {
    if !until_idle {
        janitor.run(stop).await;
    }
    std::future::pending().await
}

/// The terms on which a worker of this configuration takes jobs.
pub fn worker_terms(settings: &Settings) -> WorkerTerms {
    WorkerTerms {
        workers: settings.workers,
        lease: settings.lease,
        poll: settings.poll,
        terms: Terms {
            max_attempts: settings.max_attempts,
            retention: settings.retention,
        },
        running_per_user: settings.running_per_user.map_or(0, |n| u64::from(n.get())),
        until_idle: false,
    }
}

fn say_attempt(report: &AttemptReport, json: bool) {
    if json {
        match serde_json::to_string(report) {
            Ok(line) => say(&line),
            Err(error) => tracing::error!(%error, "the report of an attempt cannot be written"),
        }
        return;
    }
    let mut line = format!(
        "{} attempt {}: {}, {} parts written, {} kept",
        report.job_id,
        report.attempt,
        report
            .state
            .map_or("taken over by another worker", State::as_str),
        report.parts_written,
        report.parts_kept
    );
    if let (Some(messages), Some(bytes), Some(sha256)) =
        (report.messages, report.bytes, &report.sha256)
    {
        line += &format!(", {messages} messages, {bytes} bytes, sha256 {sha256}");
    }
    if let Some(problem) = &report.error {
        line += &format!(" ({}: {})", problem.kind, problem.detail);
    }
    say(&line);
}
