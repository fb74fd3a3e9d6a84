//! Which web pages of other origins may use the API (the Fetch standard's CORS protocol).

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, ALLOW,
    ORIGIN, VARY,
};
use http::{HeaderMap, HeaderValue, Method};

/// What a page may send beyond what every page may.
const ALLOWED: &str = "Authorization, Content-Type, Idempotency-Key, Last-Event-ID, Range, \
                       If-Range, If-Match, If-None-Match, If-Modified-Since, If-Unmodified-Since";

/// What a page may read beyond what every page may.
const EXPOSED: &str = "Location, Retry-After, ETag, Content-Range, Content-Length, Accept-Ranges, \
                       Repr-Digest, Idempotent-Replayed, X-Request-Id, Content-Disposition, Allow";

/// How long a browser may remember what it may do, in seconds.
const REMEMBERED: &str = "600";

/// The origins whose pages may use the API. They do so with tokens: credentials that a browser
/// sends by itself, such as cookies, are never allowed.
#[derive(Clone, Debug, Default)]
pub struct Cors(Arc<[HeaderValue]>);

impl Cors {
    /// Of these origins, each as a browser writes it. One that is no header matches nothing.
    pub fn of(origins: &[String]) -> Cors {
        let origins = origins.iter().map(|origin| HeaderValue::from_str(origin));
        Cors(origins.filter_map(Result::ok).collect())
    }

    /// `router` for these origins.
    pub fn layer(self, router: Router) -> Router {
        if self.0.is_empty() {
            return router;
        }
        router.layer(middleware::from_fn_with_state(self, answer))
    }
}

async fn answer(State(Cors(origins)): State<Cors>, request: Request, next: Next) -> Response {
    let origin = the_one(request.headers());
    let origin = origin.filter(|origin| origins.contains(origin)).cloned();
    let is_preflight = request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    // Also where there is none, lest a cache gives one page's answer to another.
    headers.append(VARY, HeaderValue::from_static("Origin"));
    let Some(origin) = origin else {
        return response;
    };
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    let methods = headers.get(ALLOW).cloned();
    if let (true, Some(methods)) = (is_preflight, methods) {
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, methods);
        let allowed = HeaderValue::from_static(ALLOWED);
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, allowed);
        let remembered = HeaderValue::from_static(REMEMBERED);
        headers.insert(ACCESS_CONTROL_MAX_AGE, remembered);
    } else {
        let exposed = HeaderValue::from_static(EXPOSED);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
    response
}

fn the_one(headers: &HeaderMap) -> Option<&HeaderValue> {
    let mut origins = headers.get_all(ORIGIN).iter();
    match (origins.next(), origins.next()) {
        (origin, None) => origin,
        (_, Some(_)) => None,
    }
}
