//! A port that is listened on.

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpStream};

/// How many bytes the system keeps of a connection that it has not sent yet. A reader that
/// stands still holds no more, and one that is slow shows soon that it reads; what is on its way
/// to a fast one is not limited.
const UNSENT_BYTES: u32 = 128 * 1024;

/// A port that is listened on. `wrap` is what connections go through: nothing, or what a test
/// puts between.
pub struct Port<F> {
    listener: TcpListener,
    wrap: F,
}

impl<F, Io> Port<F>
where
    F: Fn(TcpStream) -> Io,
{
    pub fn new(listener: TcpListener, wrap: F) -> Port<F> {
        Port { listener, wrap }
    }

    /// The next connection, and the address at its other end.
    ///
    /// # Errors
    /// It was gone before it was taken, or the system lacks what it needs, such as open files.
    pub async fn accept(&self) -> std::io::Result<(Io, SocketAddr)> {
        let (stream, address) = self.listener.accept().await?;
        // Answers are written whole; waiting for more only delays their last packet.
        let _ = stream.set_nodelay(true);
        #[cfg(target_os = "linux")]
        let _ = socket2::SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT_BYTES);
        Ok(((self.wrap)(stream), address))
    }
}
