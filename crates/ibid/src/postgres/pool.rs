//! Connections that are lent out for a while, and cut if they come back too late: a server that is
//! gone without a word, or a proxy before it, would be waited for without end.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deadpool::Runtime;
use deadpool::managed::{Manager, Metrics, Object, Pool, PoolError, RecycleError, RecycleResult};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, Error, NoTls, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::{ConnectError, PATIENCE, Pg, PgError};

/// Connections of one process.
const CONNECTIONS: usize = 16;

/// How long one transaction may take, the answers of a server that is gone without a word included.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// How often it is looked whether a connection is overdue, and so how late it may be cut.
const LOOK: Duration = Duration::from_secs(1);

/// A pool that has no connection yet.
pub(super) fn of(
    config: Config,
    tls: Option<MakeRustlsConnect>,
) -> Result<Pool<Connections>, ConnectError> {
    Pool::builder(Connections { config, tls })
        .max_size(CONNECTIONS)
        .runtime(Runtime::Tokio1)
        .wait_timeout(Some(PATIENCE))
        .create_timeout(Some(PATIENCE))
        .build()
        .map_err(|e| ConnectError::Unreachable(e.to_string()))
}

impl Pg {
    /// The same, which cuts a connection on which a transaction takes longer.
    #[must_use]
    pub fn answering_within(mut self, limit: Duration) -> Pg {
        self.answer_limit = limit;
        self
    }

    /// A connection of the pool for one short transaction. What has no answer in time fails, and
    /// whether it was done is not known then.
    ///
    /// # Errors
    /// None can be had.
    pub(crate) async fn get(&self) -> Result<Lent, PgError> {
        let connection = self.pool.get().await.map_err(no_connection)?;
        Ok(Lent::within(connection, self.answer_limit))
    }

    /// A connection of the pool for what may take as long as it needs.
    pub(super) async fn get_for_long(&self) -> Result<Lent, PgError> {
        let connection = self.pool.get().await.map_err(no_connection)?;
        Ok(Lent::for_long(connection))
    }
}

fn no_connection(error: PoolError<tokio_postgres::Error>) -> PgError {
    match error {
        PoolError::Backend(error) => PgError::Postgres(error),
        other => PgError::Pool(other.to_string()),
    }
}

/// Makes connections.
pub struct Connections {
    config: Config,
    /// By which they are encrypted, if they are.
    tls: Option<MakeRustlsConnect>,
}

impl Manager for Connections {
    type Type = Connection;
    type Error = Error;

    async fn create(&self) -> Result<Connection, Error> {
        match &self.tls {
            Some(tls) => Connection::make(&self.config, tls.clone()).await,
            None => Connection::make(&self.config, NoTls).await,
        }
    }

    async fn recycle(&self, made: &mut Connection, _: &Metrics) -> RecycleResult<Error> {
        if made.client.is_closed() {
            return Err(RecycleError::message("it was closed"));
        }
        Ok(())
    }
}

/// A connection and the task that moves its bytes.
pub struct Connection {
    client: Client,
    moving: JoinHandle<()>,
    lent: Arc<Loan>,
}

/// Until when a connection is lent, if that has an end.
#[derive(Default)]
struct Loan(Mutex<Option<Instant>>);

impl Loan {
    fn until(&self) -> MutexGuard<'_, Option<Instant>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_overdue(&self) -> bool {
        self.until().is_some_and(|until| Instant::now() >= until)
    }
}

impl Connection {
    async fn make<T>(config: &Config, tls: T) -> Result<Connection, Error>
    where
        T: MakeTlsConnect<Socket>,
        T::Stream: Send + 'static,
    {
        let (client, connection) = config.connect(tls).await?;
        let lent = Arc::<Loan>::default();
        let loan = Arc::clone(&lent);
        let overdue = async move {
            while !loan.is_overdue() {
                tokio::time::sleep(LOOK).await;
            }
        };
        let moving = tokio::spawn(async move {
            // When this ends, whatever is asked on the connection fails.
            tokio::select! {
                ended = connection => if let Err(error) = ended {
                    tracing::warn!(%error, "a connection to the database has ended");
                },
                () = overdue => {
                    tracing::warn!("the database did not answer in time; the connection is cut");
                }
            }
        });
        Ok(Connection {
            client,
            moving,
            lent,
        })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.moving.abort();
    }
}

impl Deref for Connection {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

/// A connection of the pool, until it is dropped.
pub struct Lent(Object<Connections>);

impl Lent {
    /// Lends `connection` for `limit`; what is asked on it after that fails, and so does what has
    /// no answer then.
    fn within(connection: Object<Connections>, limit: Duration) -> Lent {
        *connection.lent.until() = Some(Instant::now() + limit);
        Lent(connection)
    }

    /// Lends `connection` for as long as is needed.
    fn for_long(connection: Object<Connections>) -> Lent {
        *connection.lent.until() = None;
        Lent(connection)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        *self.0.lent.until() = None;
    }
}

impl Deref for Lent {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.0
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Connection {
        &mut self.0
    }
}
