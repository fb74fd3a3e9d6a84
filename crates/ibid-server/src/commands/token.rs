//! `ibid token`: who may speak to the API.

use std::io::Write as _;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use ibid::ids::UserId;
use ibid::ledger::{NewToken, Role};
use ibid::token::FreshToken;
use serde_json::json;

use super::{Failure, complain, duration, load, open, unavailable};
use crate::config::StoreFlags;

/// Manage the tokens of the API
#[derive(Debug, Args)]
pub struct TokenArgs {
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    Create(CreateArgs),
}

/// Create a token and print it
///
/// It is shown this once; only its digest is stored.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ibid token create --user alice
  export IBID_TOKEN=$(ibid token create --user alice --ttl 12h)
  ibid token create --user root --role admin --ttl 90m")]
struct CreateArgs {
    /// User that the token stands for
    #[arg(long, value_parser = |text: &str| UserId::parse(text).map_err(|reason| format!("it {reason}")))]
    user: UserId,
    /// What the token is good for
    #[arg(long, value_enum, default_value_t = RoleName::User)]
    role: RoleName,
    /// How long it is good, such as 30d, 12h, 90m or 45s [default: without an end]
    #[arg(long, value_name = "SPAN", value_parser = duration::parse)]
    ttl: Option<Duration>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreFlags,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleName {
    /// Own exports
    User,
    /// Write to the log over HTTP, which comes later
    Writer,
    /// The admin API
    Admin,
}

impl From<RoleName> for Role {
    fn from(name: RoleName) -> Role {
        match name {
            RoleName::User => Role::User,
            RoleName::Writer => Role::Writer,
            RoleName::Admin => Role::Admin,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// The token cannot be stored or shown.
pub async fn run(args: TokenArgs) -> Result<(), Failure> {
    match args.command {
        TokenCommand::Create(args) => create(args).await,
    }
}

async fn create(args: CreateArgs) -> Result<(), Failure> {
    let config = load(&args.store.flags())?;
    let exporter = open(&config.settings).await?;
    let token = FreshToken::generate().map_err(|e| {
        Failure::failed(format!(
            "the system gives no random numbers: {e}; try again"
        ))
    })?;
    let role = Role::from(args.role);
    let expires_at = exporter
        .ledger
        .add_token(NewToken {
            sha256: token.sha256,
            token_id: token.token_id.clone(),
            user: args.user.clone(),
            role,
            ttl: args.ttl,
        })
        .await
        .map_err(|e| unavailable(&e))?;
    let line = if args.json {
        json!({
            "token": token.text,
            "token_id": token.token_id,
            "user": args.user,
            "role": role,
            "expires_at": expires_at,
        })
        .to_string()
    } else {
        token.text
    };
    // A token that nobody has seen is of no use, so here a closed output is a failure.
    writeln!(std::io::stdout(), "{line}").map_err(|e| {
        Failure::failed(format!(
            "the token cannot be shown: {e}; create another one"
        ))
    })?;
    let until = expires_at.map_or_else(|| "without an end".to_owned(), |at| format!("until {at}"));
    complain(&format!(
        "Token {} of {} ({}) is good {until}. It is shown this once; keep it safe.",
        token.token_id,
        args.user,
        role.as_str()
    ));
    Ok(())
}
