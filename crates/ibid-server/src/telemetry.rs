//! The log of the process: to standard error, as `IBID_LOG` says.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::commands::Failure;
use crate::config::Environment;

/// Starts the log. `default` is what is shown when `IBID_LOG` is not set, such as `info`.
///
/// # Errors
/// The environment cannot be read, or `IBID_LOG` is no filter.
pub fn start(default: &str) -> Result<(), Failure> {
    let environment = Environment::from_process()?;
    let filter = environment.get("IBID_LOG").unwrap_or(default);
    let filter = EnvFilter::try_new(filter).map_err(|e| {
        Failure::usage(format!(
            "IBID_LOG is not a filter for the log: {e}; write a level such as info or debug"
        ))
    })?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // It would be told on standard error, which is what just failed, by a macro that panics.
        .log_internal_errors(false);
    // Only a second start fails, and then the log is there.
    let _ = log.try_init();
    Ok(())
}
