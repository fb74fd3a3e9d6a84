//! `ibid verify`: an export rendered again and compared.

use clap::Args;
use ibid::ids::JobId;
use ibid::verify::{Verification, VerifyError, verify};

use super::{
    Failure, MESSAGES, bar, job_id, ledger_failure, load, open_existing, say, unavailable,
};
use crate::config::StoreFlags;

/// Render an export again from the log and compare it with what was recorded
///
/// Each part, the whole file and the stored bytes are compared; nothing is written. The exit
/// code is 0 if all of them are the same, else 1.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  ibid verify aaaqeayeaudaocajbifqydiob4")]
pub struct VerifyArgs {
    /// Id of the export
    #[arg(value_name = "JOB", value_parser = job_id)]
    job: JobId,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreFlags,
}

/// Verifies one export.
///
/// # Errors
/// It cannot be checked, or something differs.
pub async fn run(args: VerifyArgs) -> Result<(), Failure> {
    let config = load(&args.store.flags())?;
    let exporter = open_existing(&config.settings).await?;
    let bar = bar(0, "verifying", MESSAGES);
    let result = verify(
        &*exporter.source,
        &*exporter.ledger,
        &exporter.vault,
        args.job,
        &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        },
    )
    .await;
    bar.finish_and_clear();
    let found = result.map_err(|error| match &error {
        VerifyError::NotFound(_) | VerifyError::OtherEncoder { .. } => {
            Failure::failed(error.to_string())
        }
        VerifyError::Ledger(ledger) => ledger_failure(ledger, args.job),
        VerifyError::Encoder(_) | VerifyError::Source(_) | VerifyError::Vault(_) => {
            unavailable(&error)
        }
    })?;
    if args.json {
        let line = serde_json::to_string(&found).map_err(|e| Failure::failed(e.to_string()))?;
        say(&line);
    } else {
        describe(&found);
    }
    if found.is_good() {
        Ok(())
    } else {
        Err(Failure::failed(format!(
            "the export {} is not what was recorded; keep the data folder as it is and look for \
             what changed the log or the store",
            found.job_id
        )))
    }
}

fn describe(found: &Verification) {
    say(&format!(
        "{}: {} messages in {} parts rendered again",
        found.job_id, found.messages, found.parts
    ));
    say(&format!("  parts      {} the same", found.parts_equal));
    for part in &found.parts_different {
        say(&format!("  part {part}: DIFFERS"));
    }
    let verdict = |equal: Option<bool>, none: &'static str| match equal {
        Some(true) => "the same",
        Some(false) => "DIFFERS",
        None => none,
    };
    let artefact = verdict(found.artefact_equal, "not made yet");
    say(&format!("  whole file {artefact}"));
    let stored = verdict(found.stored_equal, "none to look at");
    say(&format!("  stored     {stored}"));
    say(&format!("  sha256     {}", found.sha256));
}
