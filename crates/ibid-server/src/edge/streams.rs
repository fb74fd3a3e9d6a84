//! The requests of HTTP/2 connections, each a task: one whose reader stands still ends alone.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::rt::Executor;
use tokio::time::Instant;

tokio::task_local! {
    static FLOW: Arc<Flow>;
}

/// Runs requests, and ends those that have given bytes to send which the client does not take.
/// What is dropped then resets its stream and no other.
#[derive(Clone)]
pub struct Streams {
    write: Duration,
}

impl Streams {
    pub fn new(write: Duration) -> Streams {
        Streams { write }
    }
}

impl<F> Executor<F> for Streams
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, request: F) {
        let flow = Arc::<Flow>::default();
        let (watched, write) = (Arc::clone(&flow), self.write);
        tokio::spawn(FLOW.scope(flow, async move {
            tokio::select! {
                () = request => {}
                () = watched.stands_still(write) => {
                    tracing::debug!("a stream was reset whose reader took nothing");
                }
            }
        }));
    }
}

/// Since when a client has had bytes to take before the next are asked for.
#[derive(Default)]
pub struct Flow(Mutex<Option<Instant>>);

impl Flow {
    /// That of the task that runs, if it is a stream.
    pub fn of_this_task() -> Option<Arc<Flow>> {
        FLOW.try_with(Arc::clone).ok()
    }

    pub fn given(&self) {
        self.set(Some(Instant::now()));
    }

    pub fn asked(&self) {
        self.set(None);
    }

    fn set(&self, since: Option<Instant>) {
        // Nothing panics while it is held.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    fn since(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn stands_still(&self, limit: Duration) {
        loop {
            match self.since() {
                Some(since) if since.elapsed() >= limit => return,
                Some(since) => tokio::time::sleep_until(since + limit).await,
                None => tokio::time::sleep(limit).await,
            }
        }
    }
}
