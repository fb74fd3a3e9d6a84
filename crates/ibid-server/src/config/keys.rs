//! The one table of keys, and the [`Settings`] it makes.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::parse::{self, MIB, limit, redacted, whole};
use super::{Artifacts, Database, Offload, Reading};

use Fallback::{Cores, InData, Nothing, Text};

/// The data folder when nothing names one.
pub(super) const DATA: &str = "./ibid-data";

/// Upper ends where a larger value can only be a slip: it would exhaust the
/// machine or leave the range of the database's clock.
const MOST_THREADS: usize = 1024;
const DAY_SECONDS: u64 = 86_400;
const CENTURY_DAYS: u64 = 36_500;

/// What is known of a key without its parser.
pub(super) struct Key {
    /// As `ibid.toml` spells it.
    pub name: &'static str,
    /// What it means, for the reference and the help of its flag.
    pub means: &'static str,
    pub default: Fallback,
    pub form: Form,
    /// Whether its value is never shown.
    pub secret: bool,
}

/// What a key's value may be in the file. Text is always allowed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Text,
    Number,
    /// Text with commas, or a list of texts.
    List,
}

/// The value of a key that nothing gives.
pub(super) enum Fallback {
    Nothing,
    Text(&'static str),
    /// A name in the data folder, behind a scheme.
    InData(&'static str, &'static str),
    /// The number of threads that the machine runs at once.
    Cores,
}

/// Makes the table and, from the same entries, the struct and its reader.
///
/// An entry is `field: Type = key { ... }` under the meaning of the key. Its
/// parser takes the text of the value; its error is a reason that says what the
/// value must be and does not repeat it.
macro_rules! settings {
    ($(
        $(#[doc = $means:literal])+
        $field:ident: $type:ty = $key:ident {
            default: $default:expr, form: $form:ident, secret: $secret:literal,
            parse: $parse:expr $(,)?
        }
    )+) => {
        /// Every setting, parsed. What is in it can work; a limit that is `None`
        /// does not limit.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Settings {
            $( $(#[doc = $means])+ pub $field: $type, )+
        }

        pub(super) static KEYS: [Key; [$(stringify!($key)),+].len()] = [$(
            Key {
                name: stringify!($key),
                means: concat!($($means),+),
                default: $default,
                form: Form::$form,
                secret: $secret,
            },
        )+];

        impl Settings {
            /// Takes every key, so that one bad value does not hide another.
            pub(super) fn read(reading: &mut Reading) -> Option<Settings> {
                let [$($field),+] = &KEYS;
                $( let $field = reading.take($field, $parse); )+
                Some(Settings { $( $field: $field?, )+ })
            }
        }
    };
}

settings! {
    /// Folder of the embedded database, artefacts and keys
    data: PathBuf = data {
        default: Text(DATA), form: Text, secret: false, parse: parse::path,
    }

    /// Address of the API, IP:PORT or localhost:PORT; port 0 picks one and prints it
    listen: SocketAddr = listen {
        default: Text("127.0.0.1:8787"), form: Text, secret: false, parse: parse::listen,
    }

    /// How the world reaches the API: an http or https URL, without a slash at its end
    public_url: Option<String> = public_url {
        default: Nothing, form: Text, secret: false, parse: parse::public_url,
    }

    /// The ledger, and the log if no source is given: sqlite:PATH or postgres://USER@HOST/DATABASE
    database: Database = database {
        default: InData("sqlite:", "ibid.db"), form: Text, secret: false, parse: parse::database,
    }

    /// The log, if it is not in the ledger's database: as database
    source: Option<Database> = source {
        default: Nothing, form: Text, secret: false, parse: parse::source,
    }

    /// Artefacts: file:PATH, or s3://BUCKET/PREFIX, gs://, az:// with their variables (AWS_* ...)
    artifacts: Artifacts = artifacts {
        default: InData("file:", "artifacts"), form: Text, secret: false, parse: parse::artifacts,
    }

    /// Jobs at a time in this process; 0 leaves them to other processes
    workers: usize = workers {
        default: Text("1"), form: Number, secret: false,
        parse: |text| whole(text, 0..=MOST_THREADS),
    }

    /// Threads that render and compress
    render_threads: usize = render_threads {
        default: Cores, form: Number, secret: false,
        parse: |text| whole(text, 1..=MOST_THREADS),
    }

    /// Bytes of lines that end a part of a new job, plain or in KiB, MiB, GiB; at most 64 MiB
    part_bytes: u64 = part_bytes {
        default: Text("1 MiB"), form: Number, secret: false,
        parse: |text| parse::bytes(text, 64 * MIB),
    }

    /// Messages that end a part of a new job; 0 is no limit
    part_messages: Option<NonZeroU32> = part_messages {
        default: Text("0"), form: Number, secret: false, parse: limit,
    }

    /// Seconds after which a silent worker loses its job
    lease: Duration = lease_seconds {
        default: Text("30"), form: Number, secret: false,
        parse: |text| whole(text, 1..=DAY_SECONDS).map(Duration::from_secs),
    }

    /// Attempts without a new part after which a job fails
    max_attempts: u32 = max_attempts {
        default: Text("5"), form: Number, secret: false,
        parse: |text| whole(text, 1..=u32::MAX),
    }

    /// Seconds between two looks for work
    poll: Duration = poll_seconds {
        default: Text("1"), form: Number, secret: false,
        parse: |text| whole(text, 1..=DAY_SECONDS).map(Duration::from_secs),
    }

    /// Seconds that a download link lives; at most 3600
    link: Duration = link_seconds {
        default: Text("300"), form: Number, secret: false,
        parse: |text| whole(text, 1..=3600).map(Duration::from_secs),
    }

    /// Days that an artefact is kept
    retention: Duration = retention_days {
        default: Text("7"), form: Number, secret: false, parse: days,
    }

    /// Days that a job's record and its idempotency key are kept; at least retention_days
    record: Duration = record_days {
        default: Text("90"), form: Number, secret: false, parse: days,
    }

    /// Unfinished jobs of one user at the same time; 0 is no limit
    unfinished_per_user: Option<NonZeroU32> = unfinished_per_user {
        default: Text("3"), form: Number, secret: false, parse: limit,
    }

    /// Jobs of one user in 24 hours; 0 is no limit
    exports_per_user_per_day: Option<NonZeroU32> = exports_per_user_per_day {
        default: Text("20"), form: Number, secret: false, parse: limit,
    }

    /// Running jobs of one user at the same time; 0 is no limit
    running_per_user: Option<NonZeroU32> = running_per_user {
        default: Text("2"), form: Number, secret: false, parse: limit,
    }

    /// Who sends the bytes of a download: none, or presigned: the object store, to which a client is
    /// sent on by an address that lives for at most 60 s
    offload: Offload = offload {
        default: Text("none"), form: Text, secret: false, parse: parse::offload,
    }

    /// Bytes that are left free on the disk of artefacts; below it jobs wait; 0 is no limit
    min_free: u64 = min_free_bytes {
        default: Text("256 MiB"), form: Number, secret: false,
        parse: |text| parse::bytes_or_none(text, 1 << 50),
    }

    /// File of the keys that sign download links, for its owner only
    signing_keys: PathBuf = signing_keys {
        default: InData("", "keys"), form: Text, secret: false, parse: parse::path,
    }

    /// File of the TLS certificate and its chain, PEM; with tls_key the API speaks HTTPS alone
    tls_cert: Option<PathBuf> = tls_cert {
        default: Nothing, form: Text, secret: false, parse: parse::path_or_none,
    }

    /// File of the private key of tls_cert, PEM, without a passphrase
    tls_key: Option<PathBuf> = tls_key {
        default: Nothing, form: Text, secret: false, parse: parse::path_or_none,
    }

    /// Origins whose web pages may use the API, each as `https://chat.example`, separated by commas
    cors_origins: Vec<String> = cors_origins {
        default: Nothing, form: List, secret: false, parse: parse::origins,
    }

    /// Address of /metrics, which the API then has no more, IP:PORT; port 0 picks one and prints it
    metrics_listen: Option<SocketAddr> = metrics_listen {
        default: Nothing, form: Text, secret: false, parse: parse::listen_or_none,
    }

    /// Seconds that a stop waits for downloads and parts in hand
    drain: Duration = drain_seconds {
        default: Text("10"), form: Number, secret: false,
        parse: |text| whole(text, 0..=DAY_SECONDS).map(Duration::from_secs),
    }
}

impl Settings {
    /// Where the log is, if not in the ledger's database.
    pub fn log_elsewhere(&self) -> Option<&Database> {
        self.source.as_ref().filter(|log| **log != self.database)
    }

    /// The ledger's database, and the log's where it is another.
    pub fn databases(&self) -> impl Iterator<Item = &Database> {
        std::iter::once(&self.database).chain(self.log_elsewhere())
    }
}

fn days(text: &str) -> Result<Duration, String> {
    whole(text, 1..=CENTURY_DAYS).map(|days| Duration::from_secs(days * DAY_SECONDS))
}

/// The key of this exact name.
pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// The names of all keys.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|key| key.name)
}

/// The flag of the key `name`.
pub(super) fn flag(name: &str) -> String {
    format!("--{}", name.replace('_', "-"))
}

/// The environment variable of the key `name`.
pub(super) fn variable(name: &str) -> String {
    format!("IBID_{}", name.to_ascii_uppercase())
}

impl Key {
    /// One line for the help of its flag: what it means, and its default.
    pub fn help(&self) -> String {
        format!("{} [default: {}]", self.means.trim(), self.default.named())
    }

    /// `text`, a value of this key, as anyone may read it.
    pub fn shown(&self, text: &str) -> String {
        if self.secret {
            "(secret)".to_owned()
        } else {
            redacted(text)
        }
    }
}

impl Fallback {
    /// The text that stands in for a value; empty for [`Fallback::Nothing`].
    pub fn value(&self, data: &Path) -> String {
        match self {
            Nothing => String::new(),
            Text(text) => (*text).to_owned(),
            InData(scheme, name) => format!("{scheme}{}", data.join(name).display()),
            Cores => std::thread::available_parallelism()
                .map_or(1, |cores| cores.get().min(MOST_THREADS))
                .to_string(),
        }
    }

    /// The default in the words of the reference.
    fn named(&self) -> String {
        match self {
            Nothing => "none".to_owned(),
            Text(text) => (*text).to_owned(),
            InData(scheme, name) => format!("{scheme}<data>/{name}"),
            Cores => "cores".to_owned(),
        }
    }
}
