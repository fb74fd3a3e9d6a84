//! TLS: what is spoken, which certificate is shown, and what cannot be.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ibid_server::edge::Edge;
use ibid_server::tls::Certificate;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::http2::{ask, asking, over};
use super::{SOON, connect, only, patient, rest};
use crate::download::{Ready, ready_at};
use crate::harness::{Server, Setup, answer};
use crate::process::{Place, Ran, on_thread, until};

/// The files of a pair that was made for this test.
struct Pair {
    cert: PathBuf,
    key: PathBuf,
    shown: CertificateDer<'static>,
}

impl Pair {
    /// Writes a new pair into `folder`, over one that is there.
    fn new(folder: &Path) -> Pair {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(["localhost".to_owned()]).expect("a pair");
        let pair = Pair {
            cert: folder.join("cert.pem"),
            key: folder.join("key.pem"),
            shown: cert.der().clone(),
        };
        fs::write(&pair.cert, cert.pem()).expect("written");
        fs::write(&pair.key, signing_key.serialize_pem()).expect("written");
        fs::set_permissions(&pair.key, Permissions::from_mode(0o600)).expect("closed");
        pair
    }

    fn open(&self) -> Arc<Certificate> {
        Arc::new(Certificate::open(&self.cert, &self.key).expect("a good pair"))
    }
}

fn with_tls(setup: Setup, tls: &Arc<Certificate>) -> Setup {
    Setup {
        edge: Edge {
            tls: Some(Arc::clone(tls)),
            ..setup.edge
        },
        ..setup
    }
}

/// A connection to `host` by a client that trusts `trusted` alone and speaks `protocols`.
async fn handshake(
    host: &str,
    trusted: &CertificateDer<'static>,
    protocols: &[&str],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).expect("an anchor");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols
        .iter()
        .map(|name| name.as_bytes().to_vec())
        .collect();
    let stream = TcpStream::connect(host).await.expect("connected");
    let name = ServerName::try_from("localhost").expect("a name");
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

fn protocol(stream: &TlsStream<TcpStream>) -> Option<&[u8]> {
    stream.get_ref().1.alpn_protocol()
}

#[tokio::test(flavor = "multi_thread")]
async fn both_protocols_are_agreed_on_and_downloads_are_the_same_on_each() {
    let folder = tempfile::tempdir().expect("a folder");
    let pair = Pair::new(folder.path());
    let tls = pair.open();
    // The harness's own client trusts nobody that it does not know.
    let root = reqwest::Certificate::from_der(&pair.shown).expect("a certificate");
    let mut setup = with_tls(Setup::default(), &tls);
    setup.trusted = Some(root);
    let Ready {
        server,
        url,
        document,
        ..
    } = ready_at(setup).await;
    let whole = answer(server.get(&url)).await;
    assert_eq!(
        hex::encode(Sha256::digest(&whole.bytes)),
        document["sha256"].as_str().expect("hex")
    );

    let host = server.host();
    let stream = handshake(host, &pair.shown, &["h2", "http/1.1"])
        .await
        .expect("trusted");
    assert_eq!(protocol(&stream), Some(b"h2" as &[u8]));
    let (mut requests, connection) = over(stream).await;
    tokio::spawn(connection);
    let (head, body) = ask(
        &mut requests,
        asking("GET", &url, &[("range", "bytes=100-1999")]),
    )
    .await;
    assert_eq!(
        (head.status.as_u16(), &body[..]),
        (206, &whole.bytes[100..2000])
    );
    for protocols in [&["http/1.1"] as &[&str], &[]] {
        let mut stream = handshake(host, &pair.shown, protocols)
            .await
            .expect("trusted");
        assert_eq!(
            protocol(&stream),
            protocols.first().map(|name| name.as_bytes())
        );
        let headers = "Host: localhost\r\nConnection: close\r\nRange: bytes=100-1999\r\n";
        let request = format!("GET {url} HTTP/1.1\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let part = only(&rest(&mut stream).await);
        assert_eq!(
            (part.status, &part.bytes[..]),
            (206, &whole.bytes[100..2000])
        );
    }
    assert!(handshake(host, &pair.shown, &["spdy/3"]).await.is_err());

    // A problem of our own, and its last words, in the same way.
    let mut stream = handshake(host, &pair.shown, &["http/1.1"])
        .await
        .expect("trusted");
    stream.write_all(b"garbage\r\n\r\n").await.expect("sent");
    super::is_farewell(&only(&rest(&mut stream).await), 400, "malformed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_shown_and_a_bad_one_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let old = Pair::new(folder.path());
    let tls = old.open();
    let server = Server::start(with_tls(Setup::default(), &tls)).await;
    let trusted = async |pair: &Pair| handshake(server.host(), &pair.shown, &[]).await.is_ok();
    assert!(trusted(&old).await);
    let new = Pair::new(folder.path());
    tls.reload_if_changed();
    assert!(trusted(&new).await && !trusted(&old).await);

    // A certificate whose key has not come yet, then a file that is none, then none.
    let elsewhere = tempfile::tempdir().expect("a folder");
    let other = Pair::new(elsewhere.path());
    fs::copy(&other.cert, &new.cert).expect("copied");
    tls.reload_if_changed();
    assert!(trusted(&new).await);
    fs::write(&new.cert, "no certificate").expect("written");
    tls.reload_if_changed();
    assert!(trusted(&new).await);
    fs::remove_file(&new.cert).expect("removed");
    tls.reload_if_changed();
    assert!(trusted(&new).await);
    fs::copy(&other.cert, &new.cert).expect("copied");
    fs::copy(&other.key, &new.key).expect("copied");
    tls.reload_if_changed();
    assert!(trusted(&other).await && !trusted(&new).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_that_does_not_go_on_ends_and_is_in_nobodys_way() {
    let folder = tempfile::tempdir().expect("a folder");
    let pair = Pair::new(folder.path());
    let tls = pair.open();
    let setup = patient(|patience| patience.handshake = SOON);
    let server = Server::start(with_tls(setup, &tls)).await;
    let mut silent = connect(&server).await;
    let mut begun = connect(&server).await;
    begun
        .write_all(b"\x16\x03\x01\x02\x00\x01\x00")
        .await
        .expect("sent");
    until("they are taken", async || server.cut.open() == 2).await;
    assert!(handshake(server.host(), &pair.shown, &[]).await.is_ok());
    assert_eq!(rest(&mut silent).await, b"");
    assert_eq!(rest(&mut begun).await, b"");
    // Who speaks plain HTTP is told by TLS that this is none.
    let mut plain = connect(&server).await;
    plain
        .write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        .await
        .expect("sent");
    let said = rest(&mut plain).await;
    assert_eq!(said.first(), Some(&0x15), "an alert: {said:?}");
    until("they are gone", async || server.cut.open() == 0).await;
}

fn serve(place: &Place, arguments: &[&str]) -> Ran {
    place.run(&[&["serve", "--listen", "127.0.0.1:0"], arguments].concat())
}

#[test]
fn a_server_does_not_start_without_a_pair_that_can_be_shown() {
    let place = Place::new();
    let pair = Pair::new(place.folder.path());
    let elsewhere = tempfile::tempdir().expect("a folder");
    let other = Pair::new(elsewhere.path());
    let text = place.write("text.pem", &["no PEM".to_owned()]);
    let bad = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----".to_owned();
    let bad = place.write("bad.pem", &[bad]);
    let (cert, key) = (
        pair.cert.display().to_string(),
        pair.key.display().to_string(),
    );
    let other = other.key.display().to_string();
    let folder = place.folder.path().display().to_string();
    for (pair, code, said) in [
        ((Some(cert.as_str()), None), 2, "tls_key is not given"),
        ((None, Some(key.as_str())), 2, "tls_cert is not given"),
        (
            (Some("nothing.pem"), Some(&key)),
            1,
            "cannot read nothing.pem",
        ),
        ((Some(&cert), Some(&folder)), 1, "it is not a file"),
        (
            (Some(&text), Some(&key)),
            1,
            "text.pem holds no certificate",
        ),
        (
            (Some(&cert), Some(&text)),
            1,
            "text.pem holds no private key",
        ),
        ((Some(&cert), Some(&other)), 1, "do not belong together"),
        ((Some(&bad), Some(&key)), 1, "cannot be used"),
    ] {
        let given = [("--tls-cert", pair.0), ("--tls-key", pair.1)];
        let given = given
            .into_iter()
            .filter_map(|(flag, path)| Some([flag, path?]));
        let arguments: Vec<&str> = given.flatten().collect();
        let ran = serve(&place, &arguments);
        assert_eq!(ran.code, Some(code), "{arguments:?}: {ran:?}");
        assert!(ran.err.contains(said), "{arguments:?}: {ran:?}");
        assert_eq!(ran.out, "");
        // The doctor says so, too, without a start.
        let seen = place.run(&[&["doctor"], &arguments[..]].concat());
        assert!(seen.out.contains(said), "{arguments:?}: {seen:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_shows_a_renewed_certificate_without_a_restart() {
    let place = Place::new();
    let old = Pair::new(place.folder.path());
    fs::set_permissions(&old.key, Permissions::from_mode(0o644)).expect("opened");
    let said = place.folder.path().join("said");
    let log = fs::File::create(&said).expect("a file");
    let (cert, key) = (
        old.cert.display().to_string(),
        old.key.display().to_string(),
    );
    let arguments = [
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--tls-cert",
        &cert,
        "--tls-key",
        &key,
    ];
    let mut process = crate::process::Running::start(place.command(&arguments).stderr(log));
    let (line, process) = on_thread(move || (process.line(), process)).await;
    let (_, host) = line
        .trim()
        .split_once("listens on https://")
        .expect("an address");
    let trusted = async |pair: &Pair| handshake(host, &pair.shown, &[]).await.is_ok();
    assert!(trusted(&old).await);
    let warned = fs::read_to_string(&said).expect("a log");
    assert!(warned.contains("everybody"), "{warned}");
    let new = Pair::new(place.folder.path());
    until("it is shown", async || trusted(&new).await).await;
    let (code, _) = on_thread(move || process.terminate()).await;
    assert_eq!(code, Some(0));
}
