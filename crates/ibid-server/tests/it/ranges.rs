//! `ranges.tsv` over a real socket: what the planner decides is what a client gets.

#[path = "../../src/range/tests/rows.rs"]
mod rows;

use std::io::Write as _;
use std::path::PathBuf;

use http::{HeaderMap, HeaderName, HeaderValue};
use ibid::ledger::Role;
use ibid_server::range::{ByteRange, Plan, Representation};

use self::rows::{Expected, Row, table_path};
use crate::download::walk;
use crate::harness::{Answer, Server, Setup, answer, sample};

/// What rows say where they mean the file's own tag and time.
const ETAG: &str = "\"0b5c\"";
const LAST_MODIFIED_S: i64 = 1_700_000_000;

fn bytes(first: u64, last: u64) -> ByteRange {
    ByteRange { first, last }
}

fn header_map<Value: AsRef<[u8]>>(fields: &[(&str, Value)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        let name: HeaderName = name.parse().expect("a name");
        headers.append(
            name,
            HeaderValue::from_bytes(value.as_ref()).expect("a value"),
        );
    }
    headers
}

/// An export whose file is as long, and as old, as a row wants it.
struct Stage {
    server: Server,
    url: String,
    etag: String,
    artefact: PathBuf,
}

impl Stage {
    async fn open() -> Stage {
        let server = Server::start(Setup::default()).await;
        server.import(&sample()).await;
        let token = server.token("alice", Role::User).await;
        let document = server.export(&token, "k").await;
        let artefact = walk(server.folder.path())
            .into_iter()
            .find(|path| path.ends_with("export.jsonl.gz"));
        Stage {
            url: document["download"]["url"]
                .as_str()
                .expect("a link")
                .to_owned(),
            etag: format!("\"{}\"", document["sha256"].as_str().expect("a digest")),
            artefact: artefact.expect("an artefact"),
            server,
        }
    }

    /// Behind the back of the server, which must not mind.
    fn becomes(&self, file: &[u8], last_modified_s: i64) {
        std::fs::write(&self.artefact, file).expect("written");
        let path = self.server.folder.path().join("ibid.db");
        let database = rusqlite::Connection::open(path).expect("a database");
        let change = "UPDATE export SET artefact_bytes = ?1, finished_at = ?2";
        let parameters = (file.len(), last_modified_s * 1_000_000);
        let changed = database.execute(change, parameters).expect("changed");
        assert_eq!(changed, 1);
    }

    async fn ask(&self, row: &Row<'_>, representation: &Representation<'_>) -> Answer {
        let method = if row.method == "HEAD" { "HEAD" } else { "GET" };
        let method = method.parse().expect("a method");
        let url = self.server.url(&self.url);
        let mut request = self.server.client.request(method, url);
        for (name, value) in &row.headers(representation) {
            // The row's tag is the file's.
            let value = replace(value.as_bytes(), representation.etag, &self.etag);
            let value = HeaderValue::from_bytes(&value).expect("a value");
            request = request.header(name, value);
        }
        answer(request).await
    }
}

/// Replaces `from`, also without the quote at its end, which some rows leave out.
fn replace(value: &[u8], from: &str, to: &str) -> Vec<u8> {
    let (from, to) = (from.trim_end_matches('"'), to.trim_end_matches('"'));
    let Ok(text) = str::from_utf8(value) else {
        return value.to_vec();
    };
    text.replace(from, to).into_bytes()
}

/// What came, as a row says it, after a look at everything that must be said with it.
fn came(answer: &Answer, file: &[u8], is_head: bool) -> Result<Expected, String> {
    let length = answer.header("content-length");
    if !is_head && answer.status != 304 && length != answer.bytes.len().to_string() {
        return Err(format!(
            "{length} bytes said and {} sent",
            answer.bytes.len()
        ));
    }
    let kind = answer.header("content-type");
    let range = answer.header("content-range");
    match answer.status {
        200 if !range.is_empty() => Err("a range with a 200".to_owned()),
        200 if is_head && length == file.len().to_string() => Ok(Expected::Whole),
        200 if answer.bytes == file => Ok(Expected::Whole),
        304 if answer.bytes.is_empty() => Ok(Expected::NotModified),
        412 => Ok(Expected::PreconditionFailed),
        416 if range == format!("bytes */{}", file.len()) => Ok(Expected::NotSatisfiable),
        206 if kind == "application/gzip" => {
            let part = content_range(range, file)?;
            if answer.bytes != file[part.first as usize..=part.last as usize] {
                return Err(format!("other bytes than {range}"));
            }
            Ok(Expected::Partial(vec![part]))
        }
        206 if range.is_empty() => {
            let boundary = kind.strip_prefix("multipart/byteranges; boundary=");
            let boundary = boundary.ok_or_else(|| format!("of type {kind}"))?;
            several(&answer.bytes, boundary, file).map(Expected::Partial)
        }
        status => Err(format!("{status} with {range:?} of type {kind}")),
    }
}

fn content_range(text: &str, file: &[u8]) -> Result<ByteRange, String> {
    let parse = || {
        let (range, complete) = text.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let range = bytes(first.parse().ok()?, last.parse().ok()?);
        (complete == file.len().to_string()).then_some(range)
    };
    parse().ok_or_else(|| format!("the range {text:?}"))
}

/// Reads a multipart body (RFC 2046 section 5.1.1), and looks at the bytes of every part.
fn several(body: &[u8], boundary: &str, file: &[u8]) -> Result<Vec<ByteRange>, String> {
    let delimiter = format!("\r\n--{boundary}\r\n").into_bytes();
    let end = format!("\r\n--{boundary}--\r\n").into_bytes();
    let mut rest = body;
    let mut found = Vec::new();
    while let Some(part) = rest.strip_prefix(&*delimiter) {
        let blank = part.windows(4).position(|it| it == b"\r\n\r\n");
        let (head, after) = part.split_at(blank.ok_or("no head")? + 4);
        let head = str::from_utf8(head).map_err(|_| "no text")?;
        let mut fields = head.lines();
        if fields.next() != Some("Content-Type: application/gzip") {
            return Err(format!("the head {head:?}"));
        }
        let range = fields
            .next()
            .and_then(|it| it.strip_prefix("Content-Range: "));
        let range = content_range(range.unwrap_or_default(), file)?;
        let bytes = &file[range.first as usize..=range.last as usize];
        rest = after.strip_prefix(bytes).ok_or("other bytes")?;
        found.push(range);
    }
    if rest == end && found.len() > 1 {
        Ok(found)
    } else {
        Err(format!(
            "{} parts and then {} bytes",
            found.len(),
            rest.len()
        ))
    }
}

/// Bytes in which no two places look alike.
fn file(length: u64) -> Vec<u8> {
    (0..length).map(|n| (n % 251) as u8).collect()
}

#[tokio::test]
async fn every_row_of_the_table_gets_its_answer_over_a_socket() {
    let say = |line: &str| writeln!(std::io::stderr(), "{line}").expect("said");
    let path = table_path();
    let Ok(table) = std::fs::read_to_string(&path) else {
        say(&format!(
            "ranges.tsv: SKIPPED, there is no {}",
            path.display()
        ));
        return;
    };
    let stage = Stage::open().await;
    let (mut checked, mut skipped, mut failures) = (0, 0, Vec::new());
    for row in table.lines().skip(1).map(Row::parse) {
        let representation = row.representation();
        let reason = row.other_layer().or({
            (representation.length == 0).then_some("no artefact is empty: it has a head and an end")
        });
        if let Some(reason) = reason {
            println!("skipped {}: {reason}", row.case_id);
            skipped += 1;
            continue;
        }
        checked += 1;
        let file = file(representation.length);
        stage.becomes(&file, representation.last_modified_s);
        let answer = stage.ask(&row, &representation).await;
        let expected = row.expected();
        match came(&answer, &file, row.method == "HEAD") {
            Ok(came) if came == expected => {
                assert_eq!(answer.header("etag"), stage.etag, "{}", row.case_id);
                assert!(
                    !answer.header("last-modified").is_empty(),
                    "{}",
                    row.case_id
                );
            }
            other => failures.push(format!(
                "{row:?}\n  expected {expected:?}\n  came {other:?}"
            )),
        }
    }
    say(&format!(
        "ranges.tsv over a socket: {checked} rows checked, {skipped} skipped"
    ));
    let failed = failures.len();
    assert!(
        failures.is_empty(),
        "{failed} rows failed:\n{}",
        failures.join("\n")
    );
    assert!(checked > 350, "only {checked} rows could be tried");
}
