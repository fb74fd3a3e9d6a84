//! `GET, HEAD /download/{id}`.

mod multipart;

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{ConnectInfo, Path, RawQuery, State as Shared};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, future, stream};
use http::header::{
    ACCEPT_RANGES, CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE,
    CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, LAST_MODIFIED, LOCATION, REFERRER_POLICY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use ibid::exporter::{Download, DownloadError};
use ibid::ids::{JobId, RequestId};
use ibid::vault::{Asked, VaultError};

use self::multipart::Multipart;
use super::App;
use super::problem::{Problem, kinds};
use crate::range::{ByteRange, Plan, Representation, plan};

const REPR_DIGEST: HeaderName = HeaderName::from_static("repr-digest");

/// The address at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// `GET /download/{id}` and `HEAD`: all checks of the link and of the job first, then
/// preconditions, then ranges; or, where the object store sends the bytes, an address there.
pub async fn download(
    Shared(app): Shared<Arc<App>>,
    ConnectInfo(Peer(peer)): ConnectInfo<Peer>,
    method: Method,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let job = id
        .ok()
        .and_then(|Path(id)| JobId::parse(&id))
        .ok_or(DownloadError::LinkInvalid)?;
    let ring = app.keys.ring();
    let query = query.unwrap_or_default();
    let download = app.exporter.download(&ring, job, &query).await?;
    let is_head = method == Method::HEAD;
    // Preconditions and ranges are about what is sent with 200 (RFC 9110 sections 13.2.1 and
    // 14.2), so they are the store's to judge, which has an ETag of its own.
    let asked = if is_head { Asked::Head } else { Asked::Bytes };
    if let Some(address) = app.exporter.offload(&download, asked).await? {
        if !is_head {
            app.count_download(job, peer.ip().to_string());
        }
        return elsewhere(&address, &download);
    }
    let etag = format!("\"{}\"", hex::encode(download.artefact.sha256));
    let length = download.artefact.bytes;
    let finished_at = download.export.finished_at.map_or(0, |at| at.seconds());
    let representation = Representation {
        length,
        etag: &etag,
        last_modified_s: finished_at,
    };
    let mut response = match plan(is_head, &headers, &representation) {
        Plan::NotModified => StatusCode::NOT_MODIFIED.into_response(),
        Plan::PreconditionFailed => Problem::new(
            &kinds::PRECONDITION_FAILED,
            "The file has another ETag or time than the request demands; fetch it from its \
             beginning.",
        )
        .into_response(),
        Plan::NotSatisfiable => not_satisfiable(length),
        Plan::Whole => {
            let mut response = body(&app, &download, 0..length, is_head).await?;
            describe(response.headers_mut(), &download);
            response
        }
        Plan::Many(ranges) => {
            let mut response = several(&app, &download, ranges)?;
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            response
        }
        Plan::One(ByteRange { first, last }) => {
            let mut response = body(&app, &download, first..last + 1, is_head).await?;
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            describe(response.headers_mut(), &download);
            insert(
                response.headers_mut(),
                CONTENT_RANGE,
                &format!("bytes {first}-{last}/{length}"),
            );
            response
        }
    };
    let headers = response.headers_mut();
    insert(headers, ETAG, &etag);
    if let Ok(seconds) = u64::try_from(finished_at) {
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        insert(headers, LAST_MODIFIED, &httpdate::fmt_http_date(time));
    }
    if !is_head && response.status().is_success() {
        app.count_download(job, peer.ip().to_string());
    }
    Ok(response)
}

/// Sends the client on to `address`, which only the client may know.
fn elsewhere(address: &str, download: &Download) -> Result<Response, Problem> {
    let mut location = HeaderValue::from_str(address).map_err(|_| {
        DownloadError::ArtefactUnavailable("the address at the store is no header".to_owned())
    })?;
    location.set_sensitive(true);
    let mut response = StatusCode::TEMPORARY_REDIRECT.into_response();
    let headers = response.headers_mut();
    headers.insert(LOCATION, location);
    // The store does not know the digest. No ETag: what is asked there is compared with its own.
    insert(headers, REPR_DIGEST, &digest(download));
    Ok(response)
}

/// The digest of the whole file (RFC 9530).
fn digest(download: &Download) -> String {
    format!("sha-256=:{}:", STANDARD.encode(download.artefact.sha256))
}

fn not_satisfiable(length: u64) -> Response {
    let mut response = Problem::new(
        &kinds::RANGE_NOT_SATISFIABLE,
        format!("The file is {length} bytes long; ask for bytes before that."),
    )
    .into_response();
    insert(
        response.headers_mut(),
        CONTENT_RANGE,
        &format!("bytes */{length}"),
    );
    response
}

/// The bytes of a range as they come from the vault. An error in the middle breaks the
/// connection, so a short body is never taken for a whole one.
async fn body(
    app: &App,
    download: &Download,
    range: Range<u64>,
    is_head: bool,
) -> Result<Response, Problem> {
    let length = range.end - range.start;
    let body = if is_head {
        Body::empty()
    } else {
        let stream = app
            .exporter
            .read(download, range)
            .await
            .map_err(|error: VaultError| DownloadError::ArtefactUnavailable(error.to_string()))?;
        let sent = app.metrics.download_bytes();
        Body::from_stream(stream.inspect_ok(move |chunk| {
            sent.inc_by(chunk.len() as u64);
        }))
    };
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert(CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

/// The bytes of several ranges, one after the other as they are sent.
fn several(
    app: &Arc<App>,
    download: &Download,
    ranges: Vec<ByteRange>,
) -> Result<Response, Problem> {
    let boundary = RequestId::random().map_err(|error| {
        tracing::error!(%error, "the system gives no random numbers");
        Problem::unavailable("The server cannot make a boundary now; ask for one range.")
    })?;
    let multipart = Multipart::new(boundary, download.artefact.bytes);
    let length = multipart.content_length(&ranges);
    let content_type = multipart.content_type();
    let end = stream::once(future::ready(Ok(multipart.end())));
    let (exporter, sent) = (app.exporter.clone(), app.metrics.download_bytes());
    let download = download.clone();
    let described = download.clone();
    let parts = stream::iter(ranges).then(move |range| {
        let (exporter, download) = (exporter.clone(), download.clone());
        let head = stream::once(future::ready(Ok(multipart.head(range))));
        async move {
            let bytes = exporter.read(&download, range.first..range.last + 1).await;
            bytes.map(|bytes| head.chain(bytes))
        }
    });
    let body = parts.try_flatten().chain(end);
    let body = body.inspect_ok(move |chunk: &Bytes| {
        sent.inc_by(chunk.len() as u64);
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    describe(headers, &described);
    insert(headers, CONTENT_TYPE, &content_type);
    headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

/// What 200, 206 and HEAD say of the file.
fn describe(headers: &mut HeaderMap, download: &Download) {
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/gzip"));
    insert(headers, REPR_DIGEST, &digest(download));
    let name = format!(
        "attachment; filename=\"export-{}.jsonl.gz\"",
        download.export.job_id
    );
    insert(headers, CONTENT_DISPOSITION, &name);
}

/// What every answer of this route carries, whatever its status.
pub(super) fn protect(headers: &mut HeaderMap) {
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("private, no-store"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'"),
    );
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}
