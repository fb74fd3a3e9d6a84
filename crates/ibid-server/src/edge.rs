//! The edge of the server: connections, from the accept to the close.
//!
//! HTTP/1.1 and HTTP/2 share a port: with TLS by ALPN, in clear text by what the client begins
//! with. What a client may keep a server waiting for, and how much it may hold, is bounded here:
//! see [`Patience`].

mod automatic;
mod body;
mod streams;
mod wire;

use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::{Body as _, Incoming};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower_service::Service as _;

use crate::api::{Cors, Peer};
use crate::port::Port;
use crate::tls::Certificate;
pub use body::is_timeout;
use body::{AnswerBody, RequestBody};
use streams::Streams;
use wire::{Talk, Wire};

/// How long a client is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For the end of a TLS handshake.
    pub handshake: Duration,
    /// For the rest of a request's head, once a byte of it has come.
    pub head: Duration,
    /// For the next request on a connection. It may last twice as long until that is noticed.
    pub idle: Duration,
    /// For the next bytes of a request's body.
    pub body_gap: Duration,
    /// For a whole body, and a second more for each [`Patience::body_bytes_per_second`] of it
    /// that have come: a trickle ends soon, and a slow line may still send a long body.
    pub body: Duration,
    pub body_bytes_per_second: u32,
    /// For a reader that takes nothing.
    pub write: Duration,
    /// For a client that still sends what nobody will read, so that it sees why.
    pub linger: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            handshake: Duration::from_secs(10),
            head: Duration::from_secs(10),
            idle: Duration::from_secs(60),
            body_gap: Duration::from_secs(30),
            body: Duration::from_secs(60),
            body_bytes_per_second: 8 * 1024,
            write: Duration::from_secs(60),
            linger: Duration::from_secs(5),
        }
    }
}

/// The most connections of a process, if files do not set an earlier end.
const MOST_CONNECTIONS: usize = 10_000;

/// The most bytes of a request's head, and of what is buffered of an answer.
const HEAD_BYTES: usize = 64 * 1024;
const HEADERS: usize = 100;

/// Of HTTP/2: requests at a time on a connection, and how many bytes of bodies may come before
/// somebody reads them, for a request and for a connection.
const STREAMS: u32 = 100;
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;
const SEND_BYTES: usize = 64 * 1024;

/// A living client answers within the second of these; one is asked after the first.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(20);

/// How long nothing is accepted when the system has nothing left to accept with.
const SHORTAGE: Duration = Duration::from_secs(1);

/// What connections of a port are like.
#[derive(Clone)]
pub struct Edge {
    pub patience: Patience,
    /// In clear text without.
    pub tls: Option<Arc<Certificate>>,
    /// Beyond these, clients wait in the backlog of the port.
    pub connections: usize,
    pub cors: Cors,
}

impl Default for Edge {
    fn default() -> Edge {
        Edge {
            patience: Patience::default(),
            tls: None,
            connections: MOST_CONNECTIONS,
            cors: Cors::default(),
        }
    }
}

impl Edge {
    /// For those who watch the process, who are few.
    pub fn watching() -> Edge {
        Edge {
            connections: 100,
            ..Edge::default()
        }
    }
}

/// How many connections a process may have, whose limit of open files is raised as far as the
/// system lets it.
pub fn connections_by_files() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // The soft limit is low for programs that use select(2); this one does not.
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let files = files.map_or(usize::MAX, |files| {
        usize::try_from(files).unwrap_or(usize::MAX)
    });
    // Each may be sending a file, and databases need some, too.
    (files / 2).clamp(1, MOST_CONNECTIONS)
}

/// Serves `router` on `port` until `stop`. Then nothing new is accepted, idle connections are
/// closed, and it ends when the last request has. Connections that are left when it is dropped
/// are cut.
pub async fn serve<F, Io>(port: Port<F>, edge: Edge, router: Router, stop: &CancellationToken)
where
    F: Fn(TcpStream) -> Io + Send + 'static,
    Io: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let server = Arc::new(Server {
        http: http(&edge.patience),
        patience: edge.patience,
        tls: edge.tls,
        router: edge.cors.layer(router),
        stop: stop.clone(),
    });
    let places = Arc::new(Semaphore::new(edge.connections));
    let mut connections = JoinSet::new();
    loop {
        // Taken before the accept, so that who finds none waits in the backlog. Never closed.
        let Some(Ok(place)) = stop
            .run_until_cancelled(Arc::clone(&places).acquire_owned())
            .await
        else {
            break;
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = port.accept() => accepted,
            // Only to let go of those that have ended.
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((io, address)) => {
                let server = Arc::clone(&server);
                connections.spawn(async move {
                    let _place = place;
                    server.connection(io, Peer(address)).await;
                });
            }
            Err(error) if is_of_one(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "connections cannot be accepted for now");
                drop(place);
                stop.run_until_cancelled(tokio::time::sleep(SHORTAGE)).await;
            }
        }
    }
    // Who comes now is refused, and may go to another server.
    drop(port);
    while connections.join_next().await.is_some() {}
}

/// Whether only the connection is lost that was to be accepted.
fn is_of_one(error: &io::Error) -> bool {
    use ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

fn http(patience: &Patience) -> Builder<Streams> {
    let mut http = Builder::new(Streams::new(patience.write));
    http.http1()
        // The wire does that, and answers.
        .header_read_timeout(None)
        .max_headers(HEADERS)
        .max_buf_size(HEAD_BYTES)
        // In order: with vectored writes, hyper's own answer to what is no request would be
        // written before the end of the body of the answer that is still being sent.
        .writev(false);
    http.http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PONG)
        .max_concurrent_streams(STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BYTES)
        .max_header_list_size(HEAD_BYTES as u32);
    http
}

/// What all connections of a port share.
struct Server {
    http: Builder<Streams>,
    patience: Patience,
    tls: Option<Arc<Certificate>>,
    router: Router,
    stop: CancellationToken,
}

impl Server {
    async fn connection<Io>(self: Arc<Self>, io: Io, peer: Peer)
    where
        Io: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Some(tls) = &self.tls else {
            return self.converse(io, peer).await;
        };
        let handshake = tokio::time::timeout(self.patience.handshake, tls.accept(io));
        match self.stop.run_until_cancelled(handshake).await {
            Some(Ok(Ok(stream))) => self.converse(stream, peer).await,
            Some(Ok(Err(error))) => tracing::debug!(%error, ?peer, "no TLS handshake"),
            Some(Err(_)) => tracing::debug!(?peer, "a TLS handshake took too long"),
            None => {}
        }
    }

    async fn converse<Io>(&self, io: Io, peer: Peer)
    where
        Io: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let talk = Arc::<Talk>::default();
        let wire = Wire::new(io, Arc::clone(&talk), self.patience);
        let service = Conversation {
            router: self.router.clone(),
            talk: Arc::clone(&talk),
            peer,
            patience: self.patience,
        };
        let mut connection = pin!(self.http.serve_connection(TokioIo::new(wire), service));
        let mut over = pin!(async {
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = talk.falls_silent(self.patience.idle) => {}
            }
        });
        tokio::select! {
            ended = connection.as_mut() => return note(ended, peer),
            () = over.as_mut() => connection.as_mut().graceful_shutdown(),
        }
        // Who asks for nothing now has no more to expect, be the beginning of a request there.
        tokio::select! {
            ended = connection.as_mut() => note(ended, peer),
            () = talk.falls_silent(self.patience.head) => {}
        }
    }
}

fn note(ended: Result<(), Box<dyn std::error::Error + Send + Sync>>, peer: Peer) {
    if let Err(error) = ended {
        tracing::debug!(%error, ?peer, "a connection broke");
    }
}

/// The requests of one connection.
struct Conversation {
    router: Router,
    talk: Arc<Talk>,
    peer: Peer,
    patience: Patience,
}

impl hyper::service::Service<Request<Incoming>> for Conversation {
    type Response = Response<AnswerBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let in_hand = self.talk.take(!request.body().is_end_stream());
        let in_frames = request.version() == Version::HTTP_2;
        let mut request = request.map(|body| {
            Body::new(RequestBody::new(
                body,
                Arc::clone(&self.talk),
                self.patience,
            ))
        });
        request.extensions_mut().insert(ConnectInfo(self.peer));
        // A router is always ready.
        let answer = self.router.clone().call(request);
        Box::pin(async move {
            let mut answer = answer.await?;
            // What is left of the body is not read, so hyper closes; it does not say so.
            let refused = [StatusCode::REQUEST_TIMEOUT, StatusCode::PAYLOAD_TOO_LARGE];
            if !in_frames && refused.contains(&answer.status()) {
                let close = HeaderValue::from_static("close");
                answer.headers_mut().insert(CONNECTION, close);
            }
            Ok(answer.map(|body| AnswerBody::new(body, in_hand, in_frames)))
        })
    }
}
