//! A log that is an application's own: views of the names that ibid reads, over its tables. The
//! application writes it, and ibid does not.

use tokio_postgres::GenericClient;
use tokio_postgres::types::Type;

use crate::event::{Event, EventKind};
use crate::source::SourceError;

const OWN_LOG: &str =
    "the log of this database is the application's own, which ibid only reads; append there";

const OWN_ACCOUNTS: &str = "the accounts of this database are the application's own, which ibid \
     only reads; disable or enable the account there";

/// Whether events can be appended at all.
///
/// # Errors
/// [`SourceError::Refused`] where the log is the application's own.
pub(super) async fn check_log(client: &impl GenericClient) -> Result<(), SourceError> {
    if is_table(client, "message").await? {
        return Ok(());
    }
    Err(SourceError::Refused(OWN_LOG.to_owned()))
}

/// Whether `events` can be appended. To be asked first: a view may well take what is written to it.
///
/// # Errors
/// [`SourceError::Refused`] where one is about something that is the application's own.
pub(super) async fn check_appendable(
    client: &impl GenericClient,
    events: impl Iterator<Item = &Event>,
) -> Result<(), SourceError> {
    let (mut log, mut accounts) = (false, false);
    for event in events {
        match event.kind {
            EventKind::Account { .. } => accounts = true,
            _ => log = true,
        }
    }
    if log {
        check_log(client).await?;
    }
    if accounts && !is_table(client, "account").await? {
        return Err(SourceError::Refused(OWN_ACCOUNTS.to_owned()));
    }
    Ok(())
}

async fn is_table(client: &impl GenericClient, name: &str) -> Result<bool, SourceError> {
    let row = client
        .query_typed_one(
            "SELECT EXISTS (SELECT FROM pg_class
                            WHERE oid = to_regclass('ibid.' || $1) AND relkind = 'r')",
            &[(&name, Type::TEXT)],
        )
        .await?;
    Ok(row.try_get(0)?)
}
