//! The command line: which commands there are and what they take.

use clap::{Parser, Subcommand};

use crate::commands::{
    Failure, admin, config, demo, doctor, download, export, import, serve, token, verify, worker,
};
use crate::telemetry;

/// `ibid` with its arguments.
#[derive(Debug, Parser)]
#[command(
    name = "ibid",
    version,
    about = "Chat exports that are exact, repeatable and resumable",
    after_help = EXAMPLES,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  ibid demo                                  see it work, in a temporary folder
  ibid serve                                 the API with a worker inside
  ibid import chat.jsonl                     put a chat history into the log
  ibid token create --user alice             a token for alice, shown once
  ibid export --server http://127.0.0.1:8787 -o alice.jsonl.gz
                                             her export, with her token in IBID_TOKEN
  ibid doctor                                look for what keeps it from working

Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 refused by the server, 4 not reachable.

Settings are read from flags, from the environment (IBID_DATA for --data) and from ibid.toml in
the data folder, in this order; `ibid config` shows all of them. IBID_LOG=debug shows more.";

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::DemoArgs),
    Serve(serve::ServeArgs),
    Worker(worker::WorkerArgs),
    Import(import::ImportArgs),
    Token(token::TokenArgs),
    Export(export::ExportArgs),
    Download(download::DownloadArgs),
    Verify(verify::VerifyArgs),
    Doctor(doctor::DoctorArgs),
    Admin(admin::AdminArgs),
    Config(config::ConfigArgs),
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    /// Why it failed, and the exit code that says so.
    pub async fn run(self) -> Result<(), Failure> {
        telemetry::start(self.command.log_level())?;
        match self.command {
            Command::Demo(args) => demo::run(args).await,
            Command::Serve(args) => serve::run(args).await,
            Command::Worker(args) => worker::run(args).await,
            Command::Import(args) => import::run(args).await,
            Command::Token(args) => token::run(args).await,
            Command::Export(args) => export::run(args).await,
            Command::Download(args) => download::run(args).await,
            Command::Verify(args) => verify::run(args).await,
            Command::Doctor(args) => doctor::run(args).await,
            Command::Admin(args) => admin::run(args).await,
            Command::Config(args) => config::run(args),
        }
    }
}

impl Command {
    /// What is logged unless `IBID_LOG` says otherwise.
    const fn log_level(&self) -> &'static str {
        match self {
            Command::Serve(_) => "info",
            Command::Demo(_)
            | Command::Worker(_)
            | Command::Import(_)
            | Command::Token(_)
            | Command::Export(_)
            | Command::Download(_)
            | Command::Verify(_)
            | Command::Doctor(_)
            | Command::Admin(_)
            | Command::Config(_) => "warn",
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_holds_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_and_every_flag_is_described() {
        fn look(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            assert!(command.get_about().is_some(), "{path}");
            for argument in command.get_arguments().filter(|a| !a.is_hide_set()) {
                assert!(
                    argument.get_help().is_some(),
                    "{path} {}",
                    argument.get_id()
                );
            }
            for inner in command.get_subcommands() {
                look(inner, &path);
            }
        }
        let mut command = Cli::command();
        command.build();
        for inner in command.get_subcommands().filter(|c| c.get_name() != "help") {
            look(inner, "ibid");
        }
    }
}
