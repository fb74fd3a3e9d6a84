//! The program `ibid`.

use std::process::ExitCode;

use clap::Parser as _;
use ibid_server::cli::Cli;
use ibid_server::commands::Failure;

fn main() -> ExitCode {
    let cli = Cli::parse();
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
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
