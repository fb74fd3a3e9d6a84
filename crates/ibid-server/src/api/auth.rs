//! Who is asking.

use http::HeaderMap;
use http::header::AUTHORIZATION;
use ibid::ids::UserId;
use ibid::ledger::Role;
use ibid::token;

use super::App;
use super::problem::Problem;

/// The longest token that is looked at, in bytes.
const MAX_TOKEN_BYTES: usize = 8 * 1024;

/// The user that a request's bearer token stands for, if the token has the role `needed` and
/// the account is enabled.
///
/// # Errors
/// 401 without a good token, 403 with another role or a disabled account.
pub async fn caller(app: &App, headers: &HeaderMap, needed: Role) -> Result<UserId, Problem> {
    let text = bearer(headers)?;
    if !text.starts_with(token::PREFIX) {
        return Err(unknown());
    }
    let token = app
        .exporter
        .ledger
        .find_token(token::digest(text))
        .await?
        .ok_or_else(unknown)?;
    if token.role != needed {
        return Err(Problem::role_insufficient(needed.as_str()));
    }
    if !app.exporter.source.account_enabled(&token.user).await? {
        return Err(Problem::account_disabled());
    }
    Ok(token.user)
}

/// The token of the one `Authorization: Bearer` header (RFC 6750 section 2.1).
fn bearer(headers: &HeaderMap) -> Result<&str, Problem> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = match (values.next(), values.next()) {
        (Some(value), None) => value,
        (None, _) => {
            return Err(Problem::unauthorized(
                "Send a token in an Authorization: Bearer header.",
            ));
        }
        (Some(_), Some(_)) => {
            return Err(Problem::unauthorized("Send one Authorization header only."));
        }
    };
    let token = value
        .to_str()
        .ok()
        .and_then(|text| text.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, token)| token.trim_start_matches(' '))
        .filter(|token| !token.is_empty() && token.len() <= MAX_TOKEN_BYTES);
    token.ok_or_else(|| Problem::unauthorized("Send the token as Authorization: Bearer TOKEN."))
}

fn unknown() -> Problem {
    Problem::unauthorized("This token is not known, was revoked or has expired; get a new one.")
}
