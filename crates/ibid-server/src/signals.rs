//! The signals that ask the process to stop.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that SIGTERM or SIGINT cancels: then what is in hand is finished and nothing new is
/// begun. A second signal ends the process at once, with exit code 1.
///
/// # Errors
/// The system does not let signals be received.
///
/// # Panics
/// Outside of a tokio runtime.
pub fn stop_token() -> std::io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let told = stop.clone();
    tokio::spawn(async move {
        either(&mut terminate, &mut interrupt).await;
        told.cancel();
        either(&mut terminate, &mut interrupt).await;
        std::process::exit(1);
    });
    Ok(stop)
}

async fn either(one: &mut Signal, other: &mut Signal) {
    tokio::select! {
        _ = one.recv() => {}
        _ = other.recv() => {}
    }
}
