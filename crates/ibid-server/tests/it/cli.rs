//! The command line: what it says when something is wrong, and that nothing is lost.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;

use serde_json::{Value, json};

use crate::harness::{join, message, sample};
use crate::process::{Place, Ran};

/// One sentence on standard error that holds every part.
fn says(ran: &Ran, code: i32, parts: &[&str]) {
    assert_eq!(ran.code, Some(code), "{ran:?}");
    assert!(ran.err.contains("ibid: "), "{ran:?}");
    for part in parts {
        assert!(ran.err.contains(part), "{part:?} is missing: {ran:?}");
    }
    assert!(!ran.err.contains("panicked"), "{ran:?}");
}

#[test]
fn a_bad_import_names_its_lines_and_writes_nothing() {
    let place = Place::new();
    let mut lines = sample();
    lines.insert(3, "{\"kind\":\"message\"}".to_owned());
    let whole = lines.len();
    let last = lines[whole - 1].clone();
    lines[whole - 1] = last[..last.len() - 4].to_owned();
    let path = place.write("bad.jsonl", &lines);
    let ran = place.run(&["import", &path]);
    says(
        &ran,
        1,
        &[
            "bad.jsonl:4: ",
            "is missing",
            &format!("bad.jsonl:{whole}: "),
        ],
    );
    let json = place.run(&["import", &path, "--json"]);
    assert_eq!(json.code, Some(1));
    let report: Value = serde_json::from_str(json.out.trim()).expect("a report");
    assert_eq!(report["error"], "log-invalid");
    assert_eq!(report["errors"][0]["line"], 4);

    let skipped = place.run(&["import", &path, "--skip-invalid", "--json"]);
    assert_eq!(skipped.code, Some(0), "{skipped:?}");
    let report: Value = serde_json::from_str(skipped.out.trim()).expect("a report");
    assert_eq!(report["accepted"], (whole - 2) as u64);
    assert_eq!(report["skipped"].as_array().map(Vec::len), Some(2));

    let again = place.run(&["import", &path, "--skip-invalid", "--json"]);
    let report: Value = serde_json::from_str(again.out.trim()).expect("a report");
    assert_eq!(
        (&report["accepted"], &report["continued_after_line"]),
        (&0.into(), &whole.into())
    );

    let told = place.run(&["import", &path, "--skip-invalid"]);
    assert!(
        told.out.contains("imported whole before (--again"),
        "{told:?}"
    );
    let again = place.run(&["import", &path, "--skip-invalid", "--again", "--json"]);
    let report: Value = serde_json::from_str(again.out.trim()).expect("a report");
    assert!(report["accepted"].as_u64() > Some(1000), "{report}");

    let missing = place.run(&["import", "nowhere.jsonl"]);
    says(&missing, 1, &["nowhere.jsonl"]);
}

#[test]
fn standard_input_can_be_imported() {
    use std::io::Write as _;
    let place = Place::new();
    let mut child = place
        .command(&["import", "-", "--json"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut input = child.stdin.take().expect("a pipe");
    for line in sample() {
        writeln!(input, "{line}").expect("written");
    }
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!(report["accepted"], sample().len() as u64);
}

#[test]
fn a_data_folder_of_a_newer_version_is_left_as_it_is() {
    let place = Place::new();
    place.import("chat.jsonl", &[join("c", "u"), message("c", "hi")]);
    let database = place.data().join("ibid.db");
    let connection = rusqlite::Connection::open(&database).expect("opened");
    connection
        .pragma_update(None, "user_version", 9999)
        .expect("set");
    drop(connection);
    for command in [
        vec!["import", "chat.jsonl"],
        vec!["worker", "--until-idle"],
        vec!["serve", "--listen", "127.0.0.1:0"],
        vec!["token", "create", "--user", "u"],
    ] {
        says(
            &place.run(&command),
            1,
            &["newer ibid", "9999", "nothing was changed"],
        );
    }
}

#[test]
fn two_servers_on_one_data_folder_do_not_happen() {
    let place = Place::new();
    let first = place.serve(&[]);
    let second = place.run(&["serve", "--listen", "127.0.0.1:0"]);
    let process = format!("process {}", first.process.child.id());
    says(&second, 1, &["another `ibid serve`", &process]);
    // Other commands work beside it, and the lock ends with its holder.
    place.import("chat.jsonl", &sample());
    first.process.kill();
    let third = place.serve(&[]);
    assert_eq!(third.process.terminate().0, Some(0));
}

#[test]
fn a_port_in_use_is_named() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let ran = place.run(&["serve", "--listen", &address]);
    says(&ran, 1, &[&address, "--listen"]);
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let place = Place::new();
    // Root may write everywhere, so the folder stands where no folder can be.
    std::fs::write(place.folder.path().join("file"), "x").expect("written");
    for command in [
        vec!["serve", "--listen", "127.0.0.1:0", "--data", "file/data"],
        vec!["import", "--data", "file/data", "file"],
        vec!["serve", "--listen", "127.0.0.1:0", "--data", "/proc/ibid"],
        vec![
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--artifacts",
            "file:file/artifacts",
        ],
    ] {
        let ran = place.run(&command);
        says(&ran, 1, &["--"]);
    }
    let nobody = std::process::Command::new("id")
        .arg("-u")
        .output()
        .expect("an id");
    if nobody.stdout != b"0\n" {
        let folder = place.folder.path().join("read-only");
        std::fs::create_dir(&folder).expect("a folder");
        let mode = std::fs::Permissions::from_mode(0o500);
        std::fs::set_permissions(&folder, mode).expect("set");
        let ran = place.run(&["serve", "--listen", "127.0.0.1:0", "--data", "read-only"]);
        says(&ran, 1, &["read-only", "writable"]);
    }
}

#[test]
fn a_wrong_key_file_stops_the_server_and_shows_no_secret() {
    let place = Place::new();
    assert_eq!(place.serve(&[]).process.terminate().0, Some(0));
    let keys = place.data().join("keys");
    let good = std::fs::read_to_string(&keys).expect("keys");
    assert_eq!(
        std::fs::metadata(&keys)
            .expect("there")
            .permissions()
            .mode()
            & 0o777,
        0o600
    );
    let secret = good.split_whitespace().last().expect("a secret").to_owned();
    let serve = ["serve", "--listen", "127.0.0.1:0"];
    for (text, part) in [
        (String::new(), "no key"),
        ("nonsense".to_owned(), "line 1"),
        (good.replace(&secret, &secret[..20]), "32 bytes"),
        (good.replace(&secret, &format!("{secret}=")), "base64url"),
    ] {
        std::fs::write(&keys, text).expect("written");
        let ran = place.run(&serve);
        says(&ran, 1, &["keys", part]);
        assert!(!ran.err.contains(&secret[..16]), "{ran:?}");
    }
    std::fs::write(&keys, &good).expect("written");
    std::fs::set_permissions(&keys, std::fs::Permissions::from_mode(0o644)).expect("set");
    says(&place.run(&serve), 1, &["keys", "chmod 600"]);
}

#[test]
fn what_is_used_wrongly_ends_with_2() {
    let place = Place::new();
    for command in [
        vec!["export"],
        vec!["no-such-command"],
        vec!["serve", "--no-such-flag"],
        vec!["serve", "--link-seconds", "9000"],
        vec!["serve", "--database", "mysql://localhost/ibid"],
    ] {
        let ran = place.run(&command);
        assert_eq!(ran.code, Some(2), "{command:?}: {ran:?}");
    }
    let config = place.data().join("ibid.toml");
    std::fs::create_dir_all(place.data()).expect("a folder");
    std::fs::write(&config, "link_second = 5\n").expect("written");
    let ran = place.run(&["config"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(
        ran.err.contains("link_second") && ran.err.contains("link_seconds"),
        "{ran:?}"
    );
}

#[test]
fn the_configuration_is_shown_with_where_it_comes_from() {
    let place = Place::new();
    std::fs::create_dir_all(place.data()).expect("a folder");
    std::fs::write(place.data().join("ibid.toml"), "retention_days = 3\n").expect("written");
    let ran = place.run(&["config", "--json"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let entries: Vec<Value> = serde_json::from_str(&ran.out).expect("JSON");
    let of = |key: &str| {
        entries
            .iter()
            .find(|entry| entry["key"] == key)
            .expect("there")
    };
    assert_eq!(of("retention_days")["value"], "3");
    assert!(
        of("retention_days")["origin"]
            .as_str()
            .unwrap_or("")
            .contains("ibid.toml")
    );
    assert_eq!(of("data")["origin"], "environment variable IBID_DATA");
    assert_eq!(of("link_seconds")["origin"], "default");
}

#[test]
fn the_doctor_tells_good_from_bad_and_leaves_nothing_behind() {
    let place = Place::new();
    let before = place.run(&["doctor"]);
    assert!(!place.data().exists(), "{before:?}");
    place.import("chat.jsonl", &sample());
    assert_eq!(place.serve(&[]).process.terminate().0, Some(0));
    let good = place.run(&["doctor", "--json"]);
    assert_eq!(good.code, Some(0), "{good:?}");
    // A database that was restored without the artefacts it speaks of.
    let connection = rusqlite::Connection::open(place.data().join("ibid.db")).expect("opened");
    connection
        .execute(
            "INSERT INTO export (job_id, user_id, idempotency_key, fingerprint, scope, recipe,
                 encoder, snapshot, messages_total, created_at, due_at, state, expires_at,
                 artefact_sha256)
             VALUES ('j', 'u', 'k', x'', 'all', '', '', '', 0, 0, 0, 'done', ?1, x'00')",
            [i64::MAX],
        )
        .expect("a row");
    drop(connection);
    std::fs::remove_dir_all(place.data().join("artifacts")).expect("removed");
    let lost = place.run(&["doctor"]);
    assert_eq!(lost.code, Some(1), "{lost:?}");
    assert!(lost.out.contains("restore it from the backup"), "{lost:?}");
    std::fs::write(place.data().join("keys"), "nonsense").expect("written");
    let bad = place.run(&["doctor"]);
    assert_eq!(bad.code, Some(1), "{bad:?}");
    assert!(bad.out.contains("failure"), "{bad:?}");
}

#[test]
fn the_admin_commands_say_what_they_did_and_what_they_cannot_do() {
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let nothing = "aaaaaaaaaaaaaaaaaaaaaaaaaa";
    says(
        &place.run(&["admin", "revoke", nothing, "--reason", "r"]),
        1,
        &[nothing],
    );
    says(&place.run(&["admin", "restore", nothing]), 1, &[nothing]);
    assert_eq!(place.run(&["admin", "disable", "alice"]).code, Some(0));
    assert_eq!(place.run(&["admin", "enable", "alice"]).code, Some(0));
    says(&place.run(&["verify", nothing]), 1, &[nothing]);
}

#[test]
fn an_interrupted_import_is_not_told_that_nothing_was_written() {
    let place = Place::new();
    let mut lines: Vec<String> = (0..5_000).map(|n| message("c", &format!("{n}"))).collect();
    lines.push("nonsense".to_owned());
    let path = place.write("big.jsonl", &lines);
    // As if it had been killed after its first batch.
    assert_eq!(
        place.run(&["import", &path, "--skip-invalid"]).code,
        Some(0)
    );
    let connection = rusqlite::Connection::open(place.data().join("ibid.db")).expect("opened");
    connection
        .execute("UPDATE import SET lines = 5000, finished = 0", [])
        .expect("set");
    drop(connection);
    let ran = place.run(&["import", &path]);
    says(
        &ran,
        1,
        &["lines 1 to 5000", "--skip-invalid", "from line 5001 on"],
    );
    assert!(!ran.err.contains("nothing was written"), "{ran:?}");
    assert_eq!(
        place.run(&["import", &path, "--skip-invalid"]).code,
        Some(0)
    );
}

#[test]
fn a_full_disk_under_the_output_is_told() {
    let place = Place::new();
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("there");
    let mut command = place.command(&["config"]);
    let output = command.stdout(full).output().expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn a_sweep_deletes_what_nobody_needs_and_counts_it() {
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let claim = "bbbbbbbbbbbbbbbbbbbbbbbbbb";
    let left = place
        .data()
        .join("artifacts")
        .join("aaaaaaaaaaaaaaaaaaaaaaaaaa");
    std::fs::create_dir_all(left.join(claim)).expect("a folder");
    std::fs::write(left.join(claim).join("part-000000#1"), "left").expect("written");
    let swept = place.run(&["admin", "sweep", "--json"]);
    assert_eq!(swept.code, Some(0), "{swept:?}");
    let counts: Value = serde_json::from_str(&swept.out).expect("JSON");
    assert_eq!(
        counts,
        json!({"expired": 0, "objects": 1, "uploads": 0, "records": 0, "pins": 0})
    );
    assert!(!left.exists());
    let again = place.run(&["admin", "sweep"]);
    assert!(
        again.out.contains("0 exports expired, 0 objects"),
        "{again:?}"
    );
    // Of another ledger, as a copy that is tried out elsewhere.
    std::fs::write(place.data().join("artifacts/ledger"), "another").expect("written");
    says(
        &place.run(&["admin", "sweep"]),
        1,
        &["belongs to another ledger", "nothing in it was deleted"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_done_export_is_made_again_only_if_its_bytes_are_lost() {
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let token = place.token("alice");
    let served = place.serve(&[]);
    let body = json!({"scope": "all"});
    let job = served.post(&token, "k", &body).await.text("job_id");
    let done = |status: &Value| status["state"] == "done";
    let told = served.wait(&token, &job, done).await;
    says(
        &place.run(&["admin", "retry", &job]),
        1,
        &[&job, "its bytes are whole"],
    );
    let folder = place.data().join("artifacts").join(&job);
    std::fs::remove_dir_all(&folder).expect("removed");
    let queued = place.run(&["admin", "retry", &job]);
    assert_eq!(queued.code, Some(0), "{queued:?}");
    let again = served.wait(&token, &job, done).await;
    assert_eq!(again["sha256"], told["sha256"]);
    assert_eq!(again["finished_at"], told["finished_at"]);
    assert!(folder.exists());
}

#[test]
fn a_store_that_cannot_be_reached_says_what_to_look_at() {
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let run = |arguments: &[&str]| {
        let output = place
            .command(arguments)
            .env("IBID_ARTIFACTS", "s3://bucket/x")
            .env("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_ACCESS_KEY_ID", "id")
            .env("AWS_SECRET_ACCESS_KEY", "hunter2")
            .output();
        let output = output.expect("it runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (text(&output.stdout), text(&output.stderr))
    };
    let (out, err) = run(&["doctor"]);
    assert!(
        out.contains("failure  storage: s3://bucket/x cannot be used"),
        "{out}"
    );
    assert!(!format!("{out}{err}").contains("hunter2"), "{out}{err}");
    let (out, err) = run(&["admin", "sweep"]);
    assert!(err.contains("127.0.0.1:9"), "{out}{err}");
    assert!(!format!("{out}{err}").contains("hunter2"), "{out}{err}");
    let (out, _) = run(&["config"]);
    assert!(out.contains("s3://bucket/x"), "{out}");
    assert!(!out.contains("hunter2"), "{out}");
}
