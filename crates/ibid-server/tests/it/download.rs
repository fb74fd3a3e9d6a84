//! `GET /download/{id}`: headers, ranges, cuts.

use ibid::ledger::Role;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::harness::{Answer, Server, Setup, answer, sample};

pub struct Ready {
    pub server: Server,
    token: String,
    pub document: Value,
    pub url: String,
    pub bytes: u64,
    etag: String,
}

async fn ready() -> Ready {
    ready_at(Setup::default()).await
}

/// A server with an export that is done.
pub async fn ready_at(setup: Setup) -> Ready {
    let server = Server::start(setup).await;
    server.import(&sample()).await;
    let token = server.token("alice", Role::User).await;
    let document = server.export(&token, "k").await;
    Ready {
        url: document["download"]["url"]
            .as_str()
            .expect("a link")
            .to_owned(),
        bytes: document["bytes"].as_u64().expect("a length"),
        etag: format!("\"{}\"", document["sha256"].as_str().expect("a digest")),
        server,
        token,
        document,
    }
}

impl Ready {
    pub async fn get(&self, headers: &[(&str, &str)]) -> Answer {
        let mut request = self.server.get(&self.url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        answer(request).await
    }

    pub fn sha256(&self) -> &str {
        self.document["sha256"].as_str().expect("a digest")
    }
}

fn protected(answer: &Answer) {
    for (name, value) in [
        ("cache-control", "private, no-store"),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("content-security-policy", "default-src 'none'"),
    ] {
        assert_eq!(answer.header(name), value, "{name} of {}", answer.status);
    }
    for name in ["set-cookie", "content-encoding"] {
        assert!(answer.headers.get(name).is_none(), "{name}");
    }
    assert_eq!(answer.header("x-request-id").len(), 26);
}

#[tokio::test]
async fn a_whole_download_is_the_artefact_with_all_that_is_said_of_it() {
    let ready = ready().await;
    let whole = ready.get(&[]).await;
    assert_eq!(whole.status, 200);
    protected(&whole);
    assert_eq!(hex::encode(Sha256::digest(&whole.bytes)), ready.sha256());
    let job = ready.document["job_id"].as_str().expect("an id");
    use base64::Engine as _;
    let digest = base64::engine::general_purpose::STANDARD.encode(Sha256::digest(&whole.bytes));
    for (name, value) in [
        ("etag", ready.etag.clone()),
        ("last-modified", "Fri, 15 Jan 2027 12:00:00 GMT".to_owned()),
        ("accept-ranges", "bytes".to_owned()),
        ("content-length", ready.bytes.to_string()),
        ("content-type", "application/gzip".to_owned()),
        ("repr-digest", format!("sha-256=:{digest}:")),
        (
            "content-disposition",
            format!("attachment; filename=\"export-{job}.jsonl.gz\""),
        ),
    ] {
        assert_eq!(whole.header(name), value, "{name}");
    }
    // HEAD answers as GET without Range would, with the same link.
    let head = ready
        .server
        .client
        .head(ready.server.url(&ready.url))
        .header("Range", "bytes=0-9");
    let head = answer(head).await;
    assert_eq!((head.status, head.bytes.len()), (200, 0));
    for (name, value) in &whole.headers {
        if name != "date" && name != "x-request-id" {
            assert_eq!(head.headers.get(name), Some(value), "{name}");
        }
    }
    protected(&head);
}

#[tokio::test]
async fn ranges_are_answered_with_their_bytes() {
    let ready = ready().await;
    let whole = ready.get(&[]).await.bytes;
    let n = ready.bytes;
    for (range, first, last) in [
        ("bytes=0-0".to_owned(), 0, 0),
        ("bytes=1000-".to_owned(), 1000, n - 1),
        ("bytes=5-99".to_owned(), 5, 99),
        ("bytes=-7".to_owned(), n - 7, n - 1),
        (format!("bytes=-{}", n * 2), 0, n - 1),
        (format!("bytes=10-{}", u64::MAX), 10, n - 1),
        ("Bytes=3-4".to_owned(), 3, 4),
    ] {
        let part = ready.get(&[("Range", &range)]).await;
        assert_eq!(part.status, 206, "{range}");
        assert_eq!(
            part.header("content-range"),
            format!("bytes {first}-{last}/{n}")
        );
        assert_eq!(
            part.header("content-length"),
            (last - first + 1).to_string()
        );
        assert_eq!(part.header("etag"), ready.etag);
        assert_eq!(part.bytes, whole[first as usize..=last as usize], "{range}");
        protected(&part);
    }
    for beyond in [
        format!("bytes={n}-"),
        format!("bytes={}-", u64::MAX),
        "bytes=-0".to_owned(),
    ] {
        let refused = ready.get(&[("Range", &beyond)]).await;
        refused.is_problem(416, "range-not-satisfiable");
        assert_eq!(refused.header("content-range"), format!("bytes */{n}"));
        assert_eq!(refused.header("etag"), ready.etag);
        protected(&refused);
    }
    for ignored in [
        "bytes=5-3",
        "bytes=",
        "bytes=a-b",
        "chars=0-1",
        "bytes 0-1",
        "bytes=--1",
    ] {
        let all = ready.get(&[("Range", ignored)]).await;
        assert_eq!((all.status, all.bytes.len() as u64), (200, n), "{ignored}");
        assert!(all.headers.get("content-range").is_none());
    }
    let twice = ready
        .get(&[("Range", "bytes=0-0"), ("Range", "bytes=1-1")])
        .await;
    assert_eq!(twice.status, 200);
}

#[tokio::test]
async fn a_download_that_the_server_cut_goes_on_with_if_range() {
    let ready = ready().await;
    ready.server.cut.after(1000);
    let mut response = ready.server.get(&ready.url).send().await.expect("a head");
    assert_eq!(response.status(), 200);
    let mut file = Vec::new();
    let cut = loop {
        match response.chunk().await {
            Ok(Some(chunk)) => file.extend_from_slice(&chunk),
            Ok(None) => break false,
            Err(_) => break true,
        }
    };
    assert!(cut, "a short body was ended as if it were whole");
    assert_eq!(file.len(), 1000);
    let rest = ready
        .get(&[("Range", "bytes=1000-"), ("If-Range", &ready.etag)])
        .await;
    assert_eq!(rest.status, 206);
    let n = ready.bytes;
    assert_eq!(
        rest.header("content-range"),
        format!("bytes 1000-{}/{n}", n - 1)
    );
    file.extend_from_slice(&rest.bytes);
    assert_eq!(hex::encode(Sha256::digest(&file)), ready.sha256());
}

#[tokio::test]
async fn if_range_that_names_another_file_gets_the_whole_one() {
    let ready = ready().await;
    let old = format!("\"{}\"", "0".repeat(64));
    let weak = format!("W/{}", ready.etag);
    for other in [
        old.as_str(),
        weak.as_str(),
        "Fri, 15 Jan 2027 11:59:59 GMT",
        "garbage",
    ] {
        let all = ready
            .get(&[("Range", "bytes=1000-"), ("If-Range", other)])
            .await;
        assert_eq!(
            (all.status, all.bytes.len() as u64),
            (200, ready.bytes),
            "{other}"
        );
    }
    let same_time = "Fri, 15 Jan 2027 12:00:00 GMT";
    let part = ready
        .get(&[("Range", "bytes=1000-"), ("If-Range", same_time)])
        .await;
    assert_eq!(part.status, 206);
}

#[tokio::test]
async fn preconditions_come_before_ranges() {
    let ready = ready().await;
    let other = "\"other\"";
    let failed = ready
        .get(&[("If-Match", other), ("Range", "bytes=0-9")])
        .await;
    failed.is_problem(412, "precondition-failed");
    assert_eq!(failed.header("etag"), ready.etag);
    let same = ready
        .get(&[("If-None-Match", &ready.etag), ("Range", "bytes=0-9")])
        .await;
    assert_eq!((same.status, same.bytes.len()), (304, 0));
    assert_eq!(same.header("etag"), ready.etag);
    protected(&same);
    let part = ready
        .get(&[("If-Match", &ready.etag), ("Range", "bytes=0-9")])
        .await;
    assert_eq!((part.status, part.bytes.len()), (206, 10));
}

/// What browsers send when they go on with a download, as their network logs show it.
#[tokio::test]
async fn browsers_go_on_with_what_they_have() {
    let ready = ready().await;
    let whole = ready.get(&[]).await;
    let (tag, time) = (whole.header("etag"), whole.header("last-modified"));
    let rest = &whole.bytes[1000..];
    // Firefox asks for a part of exactly this file, and begins again after a 412.
    let firefox = [
        ("Range", "bytes=1000-"),
        ("If-Match", tag),
        ("If-Unmodified-Since", time),
    ];
    let part = ready.get(&firefox).await;
    assert_eq!((part.status, &part.bytes[..]), (206, rest));
    let earlier = "Fri, 15 Jan 2027 11:59:59 GMT";
    for (name, value) in [("If-Match", "\"other\""), ("If-Unmodified-Since", earlier)] {
        let changed = ready.get(&[("Range", "bytes=1000-"), (name, value)]).await;
        changed.is_problem(412, "precondition-failed");
    }
    // Chromium gets the whole of another file.
    let chromium = [("Range", "bytes=1000-"), ("If-Range", tag)];
    let part = ready.get(&chromium).await;
    assert_eq!((part.status, &part.bytes[..]), (206, rest));
    let other = [("Range", "bytes=1000-"), ("If-Range", "\"other\"")];
    assert_eq!(ready.get(&other).await.bytes, whole.bytes);
    // Safari looks first whether there are ranges at all.
    let probe = ready.get(&[("Range", "bytes=0-1")]).await;
    assert_eq!((probe.status, &probe.bytes[..]), (206, &whole.bytes[..2]));
    assert_eq!(probe.header("content-length"), "2");
}

#[tokio::test]
async fn other_methods_are_refused_and_options_says_which_are_not() {
    let ready = ready().await;
    let request = |method: reqwest::Method| {
        answer(
            ready
                .server
                .client
                .request(method, ready.server.url(&ready.url)),
        )
    };
    let options = request(reqwest::Method::OPTIONS).await;
    assert_eq!(
        (options.status, options.header("allow")),
        (204, "GET, HEAD, OPTIONS")
    );
    protected(&options);
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        let refused = request(method.parse().expect("a method")).await;
        refused.is_problem(405, "method-not-allowed");
        for allowed in ["GET", "HEAD", "OPTIONS"] {
            assert!(
                refused.header("allow").contains(allowed),
                "{:?}",
                refused.headers
            );
        }
        protected(&refused);
    }
}

#[tokio::test]
async fn downloads_are_counted_with_their_sources_and_heads_are_not() {
    let ready = ready().await;
    ready.get(&[]).await;
    ready.get(&[("Range", "bytes=0-9")]).await;
    answer(ready.server.client.head(ready.server.url(&ready.url))).await;
    let job = ready.document["job_id"].as_str().expect("an id");
    let counted = tokio::time::timeout(std::time::Duration::from_secs(20), async {
        loop {
            let status = ready.server.status(&ready.token, job).await;
            let downloads = status.body["downloads"].clone();
            if downloads["count"].as_u64() >= Some(2) {
                return downloads;
            }
            tokio::task::yield_now().await;
        }
    });
    let downloads = counted.await.expect("counted soon");
    assert_eq!(
        (&downloads["count"], &downloads["sources"]),
        (&2.into(), &1.into())
    );
    assert_eq!(downloads["last_at"], "2027-01-15T12:00:00.000000Z");
}

#[tokio::test]
async fn an_artefact_that_is_lost_or_of_another_length_is_not_served() {
    let ready = ready().await;
    let artefact = walk(ready.server.folder.path())
        .into_iter()
        .find(|path| path.ends_with("export.jsonl.gz"))
        .expect("an artefact");
    let whole = std::fs::read(&artefact).expect("read");
    std::fs::write(&artefact, &whole[..whole.len() - 1]).expect("written");
    let refused = ready.get(&[]).await;
    refused.is_problem(503, "artefact-unavailable");
    assert!(!refused.header("retry-after").is_empty());
    protected(&refused);
    // Its owner and operators are told, for as long as it is so.
    let job = ready.document["job_id"].as_str().expect("an id").to_owned();
    let flagged = ready.server.status(&ready.token, &job).await;
    assert_eq!(flagged.body["state"], "done");
    assert_eq!(flagged.body["waiting"]["type"], "artefact-unavailable");
    std::fs::remove_file(&artefact).expect("removed");
    ready.get(&[]).await.is_problem(503, "artefact-unavailable");
    std::fs::write(&artefact, &whole).expect("written");
    assert_eq!(ready.get(&[]).await.status, 200);
    let sound = ready.server.status(&ready.token, &job).await;
    assert!(sound.body.get("waiting").is_none(), "{:?}", sound.body);
}

pub fn walk(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(walk(&path));
        } else {
            found.push(path);
        }
    }
    found
}

/// A ready export that is far larger than what sockets hold.
async fn large() -> Ready {
    use base64::Engine as _;
    let mut events = vec![crate::harness::join("c", "alice")];
    let mut noise = Sha256::digest(b"seed").to_vec();
    for _ in 0..600 {
        let mut body = Vec::new();
        while body.len() < 60_000 {
            noise = Sha256::digest(&noise).to_vec();
            body.extend_from_slice(&noise);
        }
        let body = base64::engine::general_purpose::STANDARD.encode(body);
        events.push(crate::harness::message("c", &body));
    }
    of_chat(Setup::default(), &events).await
}

/// A server with alice's export of this chat.
pub async fn of_chat(setup: Setup, events: &[String]) -> Ready {
    let server = Server::start(setup).await;
    server.import(events).await;
    let token = server.token("alice", Role::User).await;
    let document = server.export(&token, "k").await;
    Ready {
        url: document["download"]["url"]
            .as_str()
            .expect("a link")
            .to_owned(),
        bytes: document["bytes"].as_u64().expect("a length"),
        etag: String::new(),
        server,
        token,
        document,
    }
}

/// Begins a download, lets `happen` happen, reads on slowly; how many bytes came, and whether
/// the connection was broken.
async fn begun(ready: &Ready, happen: impl AsyncFnOnce()) -> (u64, bool) {
    let mut response = ready.server.get(&ready.url).send().await.expect("a head");
    assert_eq!(response.status(), 200);
    let mut got = response.chunk().await.expect("bytes").expect("bytes").len() as u64;
    happen().await;
    let reading = async {
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) => got += chunk.len() as u64,
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    };
    let broken = tokio::time::timeout(std::time::Duration::from_secs(30), reading).await;
    (got, broken.expect("it ends one way or the other"))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artefact_that_is_cut_in_the_middle_of_a_download_breaks_the_connection() {
    let ready = large().await;
    let artefact = walk(ready.server.folder.path())
        .into_iter()
        .find(|path| path.ends_with("export.jsonl.gz"))
        .expect("an artefact");
    let (got, broken) = begun(&ready, async || {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&artefact)
            .expect("opened");
        file.set_len(1000).expect("cut");
    })
    .await;
    assert!(
        broken,
        "{got} of {} bytes were ended as if they were all",
        ready.bytes
    );
    assert!(got < ready.bytes);
    assert_eq!(answer(ready.server.get("/healthz")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_that_has_begun_ends_when_the_export_is_revoked_or_the_account_disabled() {
    let ready = large().await;
    let job = ready.document["job_id"].as_str().expect("an id");
    let job = ibid::ids::JobId::parse(job).expect("an id");
    let alice = ibid::ids::UserId::parse("alice").expect("an id");
    // Longer than a download goes on without being looked at again.
    let a_while = std::time::Duration::from_millis(1_100);
    let exporter = &ready.server.exporter;
    let (got, broken) = begun(&ready, async || {
        exporter
            .source
            .set_account(&alice, false)
            .await
            .expect("disabled");
        tokio::time::sleep(a_while).await;
    })
    .await;
    assert!(broken && got < ready.bytes, "{got} of {}", ready.bytes);
    exporter
        .source
        .set_account(&alice, true)
        .await
        .expect("enabled");
    let (got, broken) = begun(&ready, async || tokio::time::sleep(a_while).await).await;
    assert_eq!((got, broken), (ready.bytes, false));
    let (got, broken) = begun(&ready, async || {
        exporter.revoke(job, "r".to_owned()).await.expect("revoked");
        tokio::time::sleep(a_while).await;
    })
    .await;
    assert!(broken && got < ready.bytes, "{got} of {}", ready.bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_that_has_begun_may_outlive_its_export_for_an_hour() {
    use ibid::export::LAST_DOWNLOADS;
    let ready = large().await;
    let a_while = std::time::Duration::from_millis(1_100);
    let (server, day) = (&ready.server, std::time::Duration::from_secs(86_400));
    let janitor = server.exporter.janitor(90 * day);
    let second = std::time::Duration::from_secs(1);
    let (got, broken) = begun(&ready, async || {
        server.clock.advance(7 * day + LAST_DOWNLOADS - second);
        janitor.sweep().await.expect("swept");
        tokio::time::sleep(a_while).await;
    })
    .await;
    assert_eq!((got, broken), (ready.bytes, false));
    // The link is as old, so it is asked for first.
    let refused = answer(server.get(&ready.url)).await;
    refused.is_problem(403, "link-expired");

    let ready = large().await;
    let server = &ready.server;
    let janitor = server.exporter.janitor(90 * day);
    let (got, broken) = begun(&ready, async || {
        server.clock.advance(7 * day + LAST_DOWNLOADS);
        janitor.sweep().await.expect("swept");
        tokio::time::sleep(a_while).await;
    })
    .await;
    assert!(broken && got < ready.bytes, "{got} of {}", ready.bytes);
}
