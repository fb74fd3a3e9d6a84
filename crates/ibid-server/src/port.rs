//! The port that the API listens on.

use std::net::SocketAddr;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

/// A port that is listened on. `wrap` is what connections go through: nothing, or what a test
/// puts between.
pub struct Port<F> {
    listener: TcpListener,
    wrap: F,
}

impl<F> Port<F> {
    pub fn new(listener: TcpListener, wrap: F) -> Port<F> {
        Port { listener, wrap }
    }
}

impl<F, Io> Listener for Port<F>
where
    F: Fn(TcpStream) -> Io + Send + 'static,
    Io: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    type Io = Io;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Io, SocketAddr) {
        // The listener's own accept waits out what passes, such as too many open files.
        let (stream, address) = Listener::accept(&mut self.listener).await;
        // Answers are written whole; waiting for more only delays their last packet.
        let _ = stream.set_nodelay(true);
        ((self.wrap)(stream), address)
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}
