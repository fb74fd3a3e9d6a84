//! From text to values. Every reason says what a value must be, and none repeats
//! the value: it may hold a password, and the caller shows it as far as it may.

use ibid::vault::is_object_store;

use super::{Artifacts, Database, Offload, StoreOptions};
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

const KIB: u64 = 1024;
pub(super) const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;

/// A whole number of decimal digits in `range`.
pub(super) fn whole<T>(text: &str, range: RangeInclusive<T>) -> Result<T, String>
where
    T: FromStr + PartialOrd + Display,
{
    digits(text)
        .filter(|number| range.contains(number))
        .ok_or_else(|| {
            let (least, most) = (range.start(), range.end());
            format!("it must be a whole number from {least} to {most}")
        })
}

/// A limit; 0 is none.
pub(super) fn limit(text: &str) -> Result<Option<NonZeroU32>, String> {
    match digits(text) {
        Some(number) => Ok(NonZeroU32::new(number)),
        None => {
            let most = u32::MAX;
            Err(format!(
                "it must be a whole number from 0 (no limit) to {most}"
            ))
        }
    }
}

/// A number of bytes from 1 to `most`, as `1048576`, `1024KiB` or `1 MiB`.
pub(super) fn bytes(text: &str, most: u64) -> Result<u64, String> {
    let units = [("KiB", KIB), ("MiB", MIB), ("GiB", GIB)];
    let (number, unit) = units
        .into_iter()
        .find_map(|(suffix, unit)| {
            let number = text.strip_suffix(suffix)?;
            Some((number.strip_suffix(' ').unwrap_or(number), unit))
        })
        .unwrap_or((text, 1));
    digits::<u64>(number)
        .and_then(|number| number.checked_mul(unit))
        .filter(|bytes| (1..=most).contains(bytes))
        .ok_or_else(|| {
            format!(
                "it must be from 1 byte to {} MiB, written as plain bytes or with KiB, MiB or GiB, \
                 as 1048576 or 1 MiB",
                most / MIB
            )
        })
}

/// As [`bytes`], and 0 for no limit.
pub(super) fn bytes_or_none(text: &str, most: u64) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        text => bytes(text, most).map_err(|reason| format!("{reason}; 0 is no limit")),
    }
}

/// `text` as a number. The types' own parsers would take a sign as well.
fn digits<T: FromStr>(text: &str) -> Option<T> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        text.parse().ok()
    } else {
        None
    }
}

/// A path of this machine.
pub(super) fn path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() || text.chars().any(char::is_control) {
        return Err("it must be a path without control characters".to_owned());
    }
    Ok(PathBuf::from(text))
}

/// As [`path`], or empty where nothing gives one.
pub(super) fn path_or_none(text: &str) -> Result<Option<PathBuf>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    path(text).map(Some)
}

/// `sqlite:PATH` or the address of a PostgreSQL database.
pub(super) fn database(text: &str) -> Result<Database, String> {
    let form = "it must be sqlite:PATH with the path of a file, as sqlite:/srv/ibid/ibid.db, or \
                the address of a PostgreSQL database, as postgres://ibid@localhost/ibid";
    if is_url(text, &["postgres", "postgresql"]) {
        return Ok(Database::Postgres(text.to_owned()));
    }
    let path_text = text.strip_prefix("sqlite:").ok_or(form)?;
    // SQLite reads names of these kinds as URIs and as databases that end with
    // their connection; `//` would put the first folder where a host stands.
    if path_text.starts_with("file:") || path_text.starts_with(":memory:") {
        return Err(form.to_owned());
    }
    if path_text.starts_with("//") {
        return Err(format!("{form}, without // before the path"));
    }
    let path = path(path_text).map_err(|_| form.to_owned())?;
    Ok(Database::Sqlite(path))
}

/// As [`database`], or empty where nothing gives one.
pub(super) fn source(text: &str) -> Result<Option<Database>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    database(text).map(Some)
}

/// `file:PATH` or the address of an object store.
pub(super) fn artifacts(text: &str) -> Result<Artifacts, String> {
    let form = "it must be file:PATH with the path of a folder, as file:/srv/ibid/artifacts, or \
                s3://BUCKET/PREFIX (gs://, az://)";
    if is_url(text, &["s3", "gs", "az"]) {
        if !is_object_store(text) {
            return Err(format!(
                "{form} of plain names; the keys to it stand in the environment"
            ));
        }
        let (url, options) = (text.to_owned(), StoreOptions::default());
        return Ok(Artifacts::Store { url, options });
    }
    let path_text = text.strip_prefix("file:").ok_or(form)?;
    if path_text.starts_with("//") {
        return Err(format!("{form}, without // before the path"));
    }
    path(path_text)
        .map(Artifacts::Folder)
        .map_err(|_| form.to_owned())
}

fn is_url(text: &str, schemes: &[&str]) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| {
        schemes
            .iter()
            .any(|known| scheme.eq_ignore_ascii_case(known))
    })
}

/// An address to listen at. `localhost` is the IPv4 loopback; other names are
/// refused, because what they stand for can change while the process runs.
pub(super) fn listen(text: &str) -> Result<SocketAddr, String> {
    let address = match text.strip_prefix("localhost:") {
        Some(port) => {
            digits(port).map(|port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
        }
        None => text.parse().ok(),
    };
    address.ok_or_else(|| {
        "it must be IP:PORT or localhost:PORT, as 127.0.0.1:8787, 0.0.0.0:8787 or [::1]:8787"
            .to_owned()
    })
}

/// As [`listen`], or empty where nothing gives one.
pub(super) fn listen_or_none(text: &str) -> Result<Option<SocketAddr>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    listen(text).map(Some)
}

/// Who sends the bytes of a download.
pub(super) fn offload(text: &str) -> Result<Offload, String> {
    match text {
        "none" => Ok(Offload::None),
        "presigned" => Ok(Offload::Presigned),
        _ => Err("it must be none or presigned".to_owned()),
    }
}

/// An absolute `http` or `https` URL (RFC 3986) that paths can be put behind:
/// no user, query or fragment, and without the slashes at its end. The empty
/// text is none.
pub(super) fn public_url(text: &str) -> Result<Option<String>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let form = || {
        "it must be an absolute http or https URL without user, query and fragment, \
         as https://chat.example/exports"
            .to_owned()
    };
    let (scheme, rest) = text.split_once("://").ok_or_else(form)?;
    let scheme = scheme.to_ascii_lowercase();
    let (authority, path) = match rest.find('/') {
        Some(slash) => rest.split_at(slash),
        None => (rest, ""),
    };
    if !matches!(scheme.as_str(), "http" | "https") || !is_authority(authority) || !is_path(path) {
        return Err(form());
    }
    Ok(Some(format!(
        "{scheme}://{authority}{}",
        path.trim_end_matches('/')
    )))
}

/// Origins (RFC 6454) as browsers write them, separated by commas: the comparison is exact.
pub(super) fn origins(text: &str) -> Result<Vec<String>, String> {
    let origins = text.split(',').map(str::trim);
    let origins = origins.filter(|origin| !origin.is_empty());
    origins.map(origin).collect()
}

fn origin(text: &str) -> Result<String, String> {
    if text == "*" {
        return Err(
            "it must name the origins one by one, since exports are not for every web page"
                .to_owned(),
        );
    }
    let default_port = match text.split_once("://") {
        Some(("https", _)) => ":443",
        Some(("http", _)) => ":80",
        _ => "/",
    };
    let authority = text.split_once("://").map_or("", |(_, rest)| rest);
    let is_origin = is_authority(authority)
        && !authority.ends_with(default_port)
        && !text.bytes().any(|byte| byte.is_ascii_uppercase())
        && default_port != "/";
    if !is_origin {
        return Err(
            "it must be origins as browsers send them, separated by commas: http or https, a \
             host in lower case, a port if it is not the usual one, and no path, as \
             https://chat.example or http://localhost:3000"
                .to_owned(),
        );
    }
    Ok(text.to_owned())
}

/// Whether `text` is a host with an optional port: a name of letters, digits,
/// `-`, `_` and `.`, or an address.
fn is_authority(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        // The last colon of `[::1]` is the address's own.
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let host_is_good = match host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
    {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => {
            host.bytes().any(|byte| byte.is_ascii_alphanumeric())
                && host
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        }
    };
    host_is_good && port.is_none_or(|port| digits::<u16>(port).is_some_and(|port| port > 0))
}

/// Whether `text` is a `path-abempty` of RFC 3986 section 3.3.
fn is_path(text: &str) -> bool {
    let mut pieces = text.split('%');
    let plain = |piece: &str| {
        piece
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"/-._~!$&'()*+,;=:@".contains(&byte))
    };
    pieces.next().is_none_or(plain)
        && pieces.all(|piece| {
            let escape = piece.as_bytes().get(..2);
            escape.is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit)) && plain(piece)
        })
}

/// `text` without what may be a password in it: the credentials and the query
/// of a URL, or the whole of a `password=...` connection string.
pub(super) fn redacted(text: &str) -> String {
    if text.to_ascii_lowercase().contains("password=") && !text.contains("://") {
        return "...".to_owned();
    }
    let Some((scheme, rest)) = text.split_once("://") else {
        return text.to_owned();
    };
    // A password may hold any of `?`, `#` and `@` itself, so where an `@` is
    // nothing behind the scheme is safe.
    if rest.contains('@') {
        return format!("{scheme}://...");
    }
    match rest.find(['?', '#']) {
        Some(mark) => format!("{scheme}://{}...", &rest[..=mark]),
        None => text.to_owned(),
    }
}

/// The one of `known` that `name` was probably meant to be, if one is near.
/// Case and hyphens are not held against it.
pub(super) fn nearest(
    name: &str,
    known: impl Iterator<Item = &'static str>,
) -> Option<&'static str> {
    let name = name.to_ascii_lowercase().replace('-', "_");
    let allowed = 1 + name.len() / 4;
    known
        .map(|known| (distance(&name, known), known))
        .min()
        .filter(|(distance, _)| *distance <= allowed)
        .map(|(_, known)| known)
}

/// The insertions, deletions and replacements of characters from `a` to `b`
/// (Levenshtein), by the usual row of the table at a time.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut last = i + 1;
        let mut next = vec![last];
        for (to, above) in b.chars().zip(row.windows(2)) {
            let replaced = above[0] + usize::from(from != to);
            last = replaced.min(above[1] + 1).min(last + 1);
            next.push(last);
        }
        row = next;
    }
    row.last().copied().unwrap_or(0)
}
