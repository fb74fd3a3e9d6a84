//! The program `ibid`.

use std::process::ExitCode;

use clap::Parser as _;
use ibid_server::cli::Cli;
use ibid_server::commands::{self, Failure};

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Everything that is written is a copy of somebody's data, or a key to one.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            let failure = Failure::failed(format!(
                "no threads can be started: {error}; raise the limit of processes"
            ));
            return failure.report();
        }
    };
    let result = runtime.block_on(cli.run());
    // What still runs on a thread (a part in hand after the time to drain) is not waited for:
    // all of it can be cut at any point.
    runtime.shutdown_background();
    match result.and_then(|()| commands::all_said()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
