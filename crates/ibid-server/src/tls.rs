//! The certificate that the server shows, and its key: read from files, and read again when they
//! change.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::keys::Stamp;

/// More than any chain needs; a file that is longer is another one.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Why the certificate cannot be shown. No secret stands in any of them.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {path}: {source}; name a file that this user may read with {flag}")]
    Io {
        path: PathBuf,
        flag: &'static str,
        source: io::Error,
    },
    #[error(
        "{path} holds no certificate ({reason}); --tls-cert takes a chain in PEM, the server's own first"
    )]
    NoCertificate { path: PathBuf, reason: String },
    #[error(
        "{path} holds no private key ({reason}); --tls-key takes one in PEM, without a passphrase"
    )]
    NoKey { path: PathBuf, reason: String },
    #[error("the certificate of {cert} and the key of {key} do not belong together; name a pair")]
    NotAPair { cert: PathBuf, key: PathBuf },
    #[error("the certificate of {cert} or the key of {key} cannot be used: {reason}; make others")]
    Unusable {
        cert: PathBuf,
        key: PathBuf,
        reason: String,
    },
}

/// A pair of files, as it was when it was last right.
pub struct Certificate {
    cert: PathBuf,
    key: PathBuf,
    shown: Arc<Shown>,
    /// Of the files that were looked at last, be they right or wrong.
    looked_at: Mutex<Stamps>,
    acceptor: TlsAcceptor,
}

type Stamps = [Option<Stamp>; 2];

/// What handshakes show.
#[derive(Debug)]
struct Shown(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        // Nothing panics while it is held.
        let shown = self.0.read().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(&shown))
    }
}

impl Certificate {
    /// Reads the chain of certificates in `cert` and the key in `key`, both PEM.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn open(cert: &Path, key: &Path) -> Result<Certificate, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let looked_at = Mutex::new(stamps(cert, key));
        let pair = read(cert, key, &provider)?;
        let shown = Arc::new(Shown(RwLock::new(Arc::new(pair))));
        let unusable = |error: rustls::Error| TlsError::Unusable {
            cert: cert.to_owned(),
            key: key.to_owned(),
            reason: error.to_string(),
        };
        let resolver = Arc::<Shown>::clone(&shown);
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_no_client_auth()
            .with_cert_resolver(resolver);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        warn_of_others(key);
        Ok(Certificate {
            cert: cert.to_owned(),
            key: key.to_owned(),
            shown,
            looked_at,
            acceptor: TlsAcceptor::from(Arc::new(config)),
        })
    }

    /// Shakes hands with a client.
    ///
    /// # Errors
    /// It speaks no TLS that is understood, or it broke off.
    pub async fn accept<Io>(&self, io: Io) -> io::Result<TlsStream<Io>>
    where
        Io: AsyncRead + AsyncWrite + Unpin,
    {
        self.acceptor.accept(io).await
    }

    /// Looks whether the files are other ones than at the last look, and reads them then. A pair
    /// that is wrong is logged once, and what was shown before is shown on.
    pub fn reload_if_changed(&self) {
        // Before the bytes are read: what changes meanwhile has other stamps at the next look.
        let stamps = stamps(&self.cert, &self.key);
        {
            let mut looked_at = self
                .looked_at
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if *looked_at == stamps {
                return;
            }
            *looked_at = stamps;
        }
        match read(&self.cert, &self.key, &ring::default_provider()) {
            Ok(pair) => {
                tracing::info!(path = %self.cert.display(), "certificate read again");
                warn_of_others(&self.key);
                *self.shown.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(pair);
            }
            Err(error) => tracing::warn!(%error, "the certificate read before stays in use"),
        }
    }
}

fn stamps(cert: &Path, key: &Path) -> Stamps {
    [cert, key].map(|path| fs::metadata(path).ok().as_ref().map(Stamp::of))
}

fn read(cert: &Path, key: &Path, provider: &CryptoProvider) -> Result<CertifiedKey, TlsError> {
    let chain = bytes(cert, "--tls-cert")?;
    let no_certificate = |reason: String| TlsError::NoCertificate {
        path: cert.to_owned(),
        reason,
    };
    let chain = CertificateDer::pem_slice_iter(&chain)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| no_certificate(error.to_string()))?;
    if chain.is_empty() {
        return Err(no_certificate("nothing in it is one".to_owned()));
    }
    let private = bytes(key, "--tls-key")?;
    let private = PrivateKeyDer::from_pem_slice(&private).map_err(|error| TlsError::NoKey {
        path: key.to_owned(),
        reason: error.to_string(),
    })?;
    CertifiedKey::from_der(chain, private, provider).map_err(|error| {
        let (cert, key) = (cert.to_owned(), key.to_owned());
        match error {
            rustls::Error::InconsistentKeys(_) => TlsError::NotAPair { cert, key },
            error => TlsError::Unusable {
                cert,
                key,
                reason: error.to_string(),
            },
        }
    })
}

fn bytes(path: &Path, flag: &'static str) -> Result<Vec<u8>, TlsError> {
    let io = |source| TlsError::Io {
        path: path.to_owned(),
        flag,
        source,
    };
    let file = open(path).map_err(io)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    Ok(bytes)
}

fn open(path: &Path) -> io::Result<File> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits();
    // A pipe is refused, not waited for.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nonblocking.cast_signed())
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is not a file"))
    }
}

fn warn_of_others(key: &Path) {
    let Ok(metadata) = fs::metadata(key) else {
        return;
    };
    let mode = metadata.mode() & 0o7777;
    if mode & 0o007 != 0 {
        tracing::warn!(
            path = %key.display(),
            "the TLS key can be read or written by everybody (mode {mode:04o}); run `chmod o= {}`",
            key.display()
        );
    }
}
