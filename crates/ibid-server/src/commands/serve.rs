//! `ibid serve`: the API with workers inside.

use std::sync::Arc;

use clap::Args;
use ibid::time::Clock;
use ibid::worker::Worker;

use super::worker::worker_terms;
use super::{Failure, bind, bind_metrics, load, migrate, open, say};
use crate::api::{App, Cors};
use crate::config::{ServeFlags, Settings, StoreFlags, WorkFlags};
use crate::edge::{Edge, Patience, connections_by_files};
use crate::keys::KeyStore;
use crate::lifecycle::{self, ServeLock};
use crate::metrics::of_attempts;
use crate::port::Port;
use crate::signals;
use crate::tls::Certificate;

/// Serve the API, with workers inside
///
/// Makes what is missing in the data folder, and ends on SIGTERM or SIGINT: requests and parts in
/// hand are finished, and exports that are not done are given back.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ibid serve
  ibid serve --data /var/lib/ibid --listen 0.0.0.0:8787 --public-url https://export.example
  ibid serve --workers 0                     leave the work to `ibid worker`
  ibid serve --tls-cert /etc/ibid/chain.pem --tls-key /etc/ibid/key.pem
  ibid serve --metrics-listen 127.0.0.1:9100 /metrics there, for Prometheus alone")]
pub struct ServeArgs {
    /// Bring the schema of PostgreSQL databases up to date first
    #[arg(long)]
    pub migrate: bool,
    #[command(flatten)]
    pub store: StoreFlags,
    #[command(flatten)]
    pub work: WorkFlags,
    #[command(flatten)]
    pub serve: ServeFlags,
}

/// Serves until a signal asks to stop.
///
/// # Errors
/// A configuration that cannot work, a data folder that another server holds, a port in use, a
/// store that cannot be opened.
pub async fn run(args: ServeArgs) -> Result<(), Failure> {
    let flags = args.store.flags().merge(args.work.flags());
    let config = load(&flags.merge(args.serve.flags()))?;
    let settings = &config.settings;
    // Held until the end of this function.
    let _lock = ServeLock::take(&settings.data).map_err(|e| Failure::failed(e.to_string()))?;
    if args.migrate {
        for database in settings.databases() {
            migrate(database).await?;
        }
    }
    let exporter = open(settings).await?;
    let keys = KeyStore::open_or_create(&settings.signing_keys, Clock::system().now())
        .map_err(|e| Failure::failed(e.to_string()))?;
    let edge = edge(settings)?;
    let (listener, address) = bind(settings.listen, "--listen")?;
    let watching = bind_metrics(settings)?;
    let stop = signals::stop_token().map_err(|e| {
        Failure::failed(format!("signals cannot be received: {e}; check the limits"))
    })?;
    let app = App::new(
        exporter,
        Arc::new(keys),
        settings.public_url.clone(),
        settings.record,
        settings.poll,
    );
    let worker = (settings.workers > 0).then(|| {
        let workshop = app.exporter.workshop(settings.render_threads, None);
        let wake = app.exporter.created();
        let report = of_attempts(&app.metrics);
        Worker::new(workshop, worker_terms(settings), wake, report)
    });
    say(&format!(
        "ibid {} listens on {}://{address}",
        env!("CARGO_PKG_VERSION"),
        if edge.tls.is_some() { "https" } else { "http" }
    ));
    let watching = watching.map(|(listener, text)| {
        say(&text);
        listener
    });
    let port = Port::new(listener, |stream| stream);
    lifecycle::run(port, edge, app, watching, worker, stop, settings.drain).await;
    Ok(())
}

fn edge(settings: &Settings) -> Result<Edge, Failure> {
    let tls = match (&settings.tls_cert, &settings.tls_key) {
        (Some(cert), Some(key)) => {
            let certificate = Certificate::open(cert, key);
            let certificate = certificate.map_err(|e| Failure::failed(e.to_string()))?;
            Some(Arc::new(certificate))
        }
        _ => None,
    };
    Ok(Edge {
        patience: Patience::default(),
        tls,
        connections: connections_by_files(),
        cors: Cors::of(&settings.cors_origins),
    })
}
