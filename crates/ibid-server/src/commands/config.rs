//! `ibid config`: what the process would run with.

use clap::Args;

use super::{Failure, load, say};
use crate::config::{ServeFlags, StoreFlags, WorkFlags};

/// Show the effective configuration and where each value comes from
///
/// No secret is shown. Nothing is created or changed.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ibid config
  IBID_LINK_SECONDS=60 ibid config --data /srv/ibid --json")]
pub struct ConfigArgs {
    /// Print a JSON array of {"key", "value", "origin"}
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreFlags,
    #[command(flatten)]
    work: WorkFlags,
    #[command(flatten)]
    serve: ServeFlags,
}

/// Prints the configuration.
///
/// # Errors
/// It cannot work.
pub fn run(args: ConfigArgs) -> Result<(), Failure> {
    let flags = args.store.flags().merge(args.work.flags());
    let config = load(&flags.merge(args.serve.flags()))?;
    if args.json {
        say(&config.json().to_string());
    } else {
        say(config.table().trim_end());
    }
    Ok(())
}
