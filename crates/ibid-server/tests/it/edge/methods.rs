//! Methods of every route, and pages of other origins.

use ibid_server::api::Cors;
use ibid_server::edge::Edge;

use super::server;
use crate::harness::{Answer, Server, Setup, answer};

async fn ask(server: &Server, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let method = method.parse().expect("a method");
    let mut request = server.client.request(method, server.url(path));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    answer(request).await
}

#[tokio::test]
async fn every_route_tells_its_methods_and_refuses_others() {
    let server = server().await;
    for (path, methods) in [
        ("/", "GET, HEAD"),
        ("/healthz", "GET, HEAD"),
        ("/readyz", "GET, HEAD"),
        ("/metrics", "GET, HEAD"),
        ("/problems/malformed", "GET, HEAD"),
        ("/exports", "POST, GET, HEAD"),
        ("/exports/x", "GET, HEAD, DELETE"),
        ("/download/x", "GET, HEAD"),
        ("/log", "POST"),
        ("/admin/exports/x/revoke", "POST"),
        ("/admin/accounts/x", "PUT"),
    ] {
        let allowed = format!("{methods}, OPTIONS");
        let options = ask(&server, "OPTIONS", path, &[]).await;
        assert_eq!(
            (options.status, options.header("allow")),
            (204, allowed.as_str()),
            "{path}"
        );
        assert_eq!(options.header("x-request-id").len(), 26);
        let refused = ask(&server, "PATCH", path, &[]).await;
        refused.is_problem(405, "method-not-allowed");
        assert_eq!(refused.header("allow"), allowed, "{path}");
    }
    ask(&server, "OPTIONS", "/nothing", &[])
        .await
        .is_problem(404, "not-found");
    for path in [
        "/",
        "/healthz",
        "/problems/malformed",
        "/exports",
        "/nothing",
    ] {
        let (head, get) = (
            ask(&server, "HEAD", path, &[]).await,
            ask(&server, "GET", path, &[]).await,
        );
        assert_eq!((head.status, head.bytes.len()), (get.status, 0), "{path}");
        assert_eq!(
            head.header("content-length"),
            get.bytes.len().to_string(),
            "{path}"
        );
    }
}

const PAGE: &str = "https://chat.example";

async fn with_cors() -> Server {
    Server::start(Setup {
        edge: Edge {
            cors: Cors::of(&[PAGE.to_owned(), "http://localhost:3000".to_owned()]),
            ..Edge::default()
        },
        ..Setup::default()
    })
    .await
}

fn has_no_cors(answer: &Answer) {
    let mut names = answer.headers.keys();
    let told = names.find(|name| name.as_str().starts_with("access-control-"));
    assert_eq!(told, None, "{:?}", answer.headers);
}

#[tokio::test]
async fn pages_of_listed_origins_may_use_the_api() {
    let server = with_cors().await;
    let preflight = [
        ("Origin", PAGE),
        ("Access-Control-Request-Method", "POST"),
        (
            "Access-Control-Request-Headers",
            "authorization,idempotency-key,content-type",
        ),
    ];
    let may = ask(&server, "OPTIONS", "/exports", &preflight).await;
    assert_eq!(may.status, 204);
    assert_eq!(may.header("access-control-allow-origin"), PAGE);
    assert_eq!(
        may.header("access-control-allow-methods"),
        "POST, GET, HEAD, OPTIONS"
    );
    let allowed = may
        .header("access-control-allow-headers")
        .to_ascii_lowercase();
    let allowed: Vec<_> = allowed.split(", ").collect();
    for name in [
        "authorization",
        "content-type",
        "idempotency-key",
        "last-event-id",
        "range",
        "if-range",
        "if-none-match",
    ] {
        assert!(allowed.contains(&name), "{allowed:?}");
    }
    // Also what is refused can be read by the page.
    let refused = ask(&server, "GET", "/exports", &[("Origin", PAGE)]).await;
    refused.is_problem(401, "unauthorized");
    assert_eq!(refused.header("access-control-allow-origin"), PAGE);
    let exposed = refused
        .header("access-control-expose-headers")
        .to_ascii_lowercase();
    let exposed: Vec<_> = exposed.split(", ").collect();
    for name in [
        "location",
        "retry-after",
        "etag",
        "content-range",
        "accept-ranges",
        "repr-digest",
        "idempotent-replayed",
        "x-request-id",
        "content-disposition",
    ] {
        assert!(exposed.contains(&name), "{exposed:?}");
    }
    for answer in [&may, &refused] {
        assert!(
            answer
                .headers
                .get("access-control-allow-credentials")
                .is_none()
        );
        assert_eq!(answer.header("vary"), "Origin");
    }
    let other = [("Origin", "http://localhost:3000")];
    let download = ask(&server, "GET", "/download/x", &other).await;
    download.is_problem(403, "link-invalid");
    assert_eq!(
        download.header("access-control-allow-origin"),
        "http://localhost:3000"
    );
}

#[tokio::test]
async fn other_origins_get_nothing() {
    let server = with_cors().await;
    for origin in [
        "https://chat.example.evil",
        "http://chat.example",
        "null",
        "*",
        "https://chat.exampl",
    ] {
        let headers = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
        ];
        for method in ["OPTIONS", "GET"] {
            let answer = ask(&server, method, "/", &headers).await;
            has_no_cors(&answer);
            let mut vary = answer.headers.get_all("vary").iter();
            assert!(vary.any(|vary| vary == "Origin"), "{:?}", answer.headers);
        }
    }
    has_no_cors(&ask(&server, "GET", "/", &[]).await);
    let twice = [("Origin", PAGE), ("Origin", PAGE)];
    has_no_cors(&ask(&server, "GET", "/", &twice).await);
    // Where none is listed, nothing speaks of origins.
    let without = super::server().await;
    let answer = ask(&without, "GET", "/healthz", &[("Origin", PAGE)]).await;
    has_no_cors(&answer);
    assert!(answer.headers.get("vary").is_none(), "{:?}", answer.headers);
}
