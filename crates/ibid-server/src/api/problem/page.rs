//! `GET /problems/{name}`: what the `type` of a problem leads to.

use axum::Json;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::response::{Html, IntoResponse as _, Response};
use http::header::{ACCEPT, CONTENT_SECURITY_POLICY, VARY};
use http::{HeaderMap, HeaderValue};
use serde::Serialize;
use utoipa::ToSchema;

use super::{Kind, Problem};

/// Describes a kind of problem: as a page if Accept names `text/html`, otherwise as JSON.
pub async fn page(
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, Problem> {
    let kind = name.ok().and_then(|Path(name)| Kind::named(&name));
    let kind = kind.ok_or_else(|| Problem::not_found("There is no problem of this name."))?;
    let accepted = headers.get_all(ACCEPT).iter();
    let mut accepted = accepted.filter_map(|line| line.to_str().ok());
    let mut response = if accepted.any(|line| line.contains("text/html")) {
        html(kind).into_response()
    } else {
        let page = ProblemKind {
            kind: format!("/problems/{}", kind.name),
            title: kind.title,
            status: kind.status.as_u16(),
            when: kind.when,
            what_to_do: kind.todo,
        };
        Json(page).into_response()
    };
    let headers = response.headers_mut();
    headers.insert(VARY, HeaderValue::from_static("Accept"));
    headers.insert(
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'"),
    );
    Ok(response)
}

/// A kind of problem.
#[derive(Serialize, ToSchema)]
pub(in super::super) struct ProblemKind {
    /// The `type` that its answers have.
    #[serde(rename = "type")]
    kind: String,
    title: &'static str,
    status: u16,
    /// When this is answered.
    when: &'static str,
    /// What a client should do.
    what_to_do: &'static str,
}

/// Everything in it is a constant of this program.
fn html(kind: &Kind) -> Html<String> {
    let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;");
    Html(format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n\
         <h1>{title}</h1>\n<p><code>{name}</code>, status {status}</p>\n\
         <h2>When</h2>\n<p>{when}</p>\n<h2>What to do</h2>\n<p>{todo}</p>\n</html>\n",
        title = escape(kind.title),
        name = kind.name,
        status = kind.status.as_u16(),
        when = escape(kind.when),
        todo = escape(kind.todo),
    ))
}
