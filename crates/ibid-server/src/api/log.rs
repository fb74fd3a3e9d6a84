//! `POST /log`: events of the application into the log.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State as Shared};
use http::HeaderMap;
use ibid::append::Outcome;
use ibid::event::Invalid;
use ibid::ids::ConvId;
use ibid::import::{AppendError, Appended, append};
use ibid::ledger::Role;
use serde::Serialize;
use utoipa::ToSchema;

use super::App;
use super::auth::caller;
use super::body::{Taken, read_body};
use super::openapi::schemas;
use super::problem::{LineError, Problem, kinds};

/// How many bodies are held in memory at the same time; others wait.
pub const BODIES: usize = 4;

/// The most invalid lines that an answer names.
const MAX_ERRORS: usize = 100;

/// What became of the lines.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct Taking {
    /// How many events are in the log now that were not before.
    accepted: u64,
    /// How many have an id that is in the log already, with the same content.
    duplicates: u64,
    /// How many would change nothing, such as a join of somebody who is inside.
    unchanged: u64,
    /// Where the messages are now.
    assigned: Vec<Assigned>,
    /// The lines that are not valid, which were left out because that was asked for.
    skipped: Vec<LineError>,
}

/// A message, by its line, and its place in its conversation.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Assigned {
    /// The number of its line in the body, from 1.
    #[schema(minimum = 1)]
    line: u64,
    #[schema(value_type = schemas::ConvId)]
    conv: ConvId,
    /// Its number in the conversation, from 1.
    #[schema(minimum = 1)]
    seq: u64,
}

/// Appends the events of the body in one transaction.
pub async fn take(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Json<Taking>, Problem> {
    caller(&app, &headers, Role::Writer).await?;
    let skip_invalid = match query.as_deref() {
        None | Some("" | "skip_invalid=0") => false,
        Some("skip_invalid=1") => true,
        Some(_) => {
            return Err(Problem::request_invalid(
                "The only parameter here is skip_invalid, which is 0 or 1.",
            ));
        }
    };
    // Taken before the body is read, and it is never closed.
    let _place = app.bodies.acquire().await;
    let body = read_body(&headers, body, &Taken::EVENTS).await?;
    let appended = append(app.exporter.source.as_ref(), &body, skip_invalid).await;
    match appended {
        Ok(appended) => Ok(Json(Taking::of(appended))),
        Err(AppendError::Refused(lines)) => Err(refused(lines)),
        Err(AppendError::Source(error)) => Err(error.into()),
    }
}

impl Taking {
    fn of(appended: Appended) -> Taking {
        let mut taking = Taking::default();
        for (line, outcome) in appended.outcomes {
            match outcome {
                Outcome::Accepted { assigned } => {
                    taking.accepted += 1;
                    let assigned = assigned.map(|(conv, seq)| Assigned { line, conv, seq });
                    taking.assigned.extend(assigned);
                }
                Outcome::Duplicate => taking.duplicates += 1,
                Outcome::Unchanged => taking.unchanged += 1,
                Outcome::Invalid(invalid) => taking.skipped.push(line_error(line, invalid)),
            }
        }
        taking
    }
}

fn refused(lines: Vec<(u64, Invalid)>) -> Problem {
    let count = lines.len();
    let first = lines.first().map_or(0, |(line, _)| *line);
    let mut detail = format!(
        "{count} lines are not valid, the first of them line {first}; nothing of the body was \
         written."
    );
    if count > MAX_ERRORS {
        detail += &format!(" The first {MAX_ERRORS} are named.");
    }
    let errors = lines.into_iter().take(MAX_ERRORS);
    let errors = errors.map(|(line, invalid)| line_error(line, invalid));
    Problem::new(&kinds::LOG_INVALID, detail).with_errors(errors.collect())
}

fn line_error(line: u64, invalid: Invalid) -> LineError {
    LineError {
        line,
        field: invalid.field,
        reason: invalid.reason,
    }
}
