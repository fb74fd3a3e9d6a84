//! What each key takes and refuses.

use super::*;

#[test]
fn numbers_outside_their_range_are_refused_and_its_ends_are_not() {
    let most = u32::MAX.to_string();
    for (key, least, most) in [
        ("workers", "0", "1024"),
        ("render_threads", "1", "1024"),
        ("lease_seconds", "1", "86400"),
        ("max_attempts", "1", most.as_str()),
        ("poll_seconds", "1", "86400"),
        ("link_seconds", "1", "3600"),
        ("record_days", "7", "36500"),
        ("drain_seconds", "0", "86400"),
    ] {
        flag(key, least).settings();
        flag(key, most).settings();
        let above = (most.parse::<u64>().unwrap() + 1).to_string();
        let first = if key == "record_days" { "1" } else { least };
        for bad in [
            above.as_str(),
            "-1",
            "+5",
            "1.5",
            "",
            " 5",
            "5s",
            "99999999999999999999999",
        ] {
            let expected = format!("it must be a whole number from {first} to {most}");
            assert_eq!(reason(key, bad), expected, "{bad}");
        }
        if first == "1" {
            assert!(reason(key, "0").ends_with(most), "{key}");
        }
    }
    flag("retention_days", "1").settings();
    assert_eq!(
        reason("retention_days", "0"),
        "it must be a whole number from 1 to 36500"
    );
}

#[test]
fn zero_is_no_limit() {
    type Limit = fn(&Settings) -> Option<NonZeroU32>;
    let limits: [(&str, Limit); 4] = [
        ("part_messages", |s| s.part_messages),
        ("unfinished_per_user", |s| s.unfinished_per_user),
        ("exports_per_user_per_day", |s| s.exports_per_user_per_day),
        ("running_per_user", |s| s.running_per_user),
    ];
    for (key, limit) in limits {
        assert_eq!(limit(&flag(key, "0").settings()), None);
        assert_eq!(limit(&flag(key, "200").settings()), limited(200));
        let expected = "it must be a whole number from 0 (no limit) to 4294967295";
        for bad in ["-1", "4294967296", "", "none"] {
            assert_eq!(reason(key, bad), expected);
        }
    }
}

#[test]
fn sizes_are_plain_bytes_or_have_a_unit() {
    for (text, bytes) in [
        ("1", 1),
        ("4096", 4096),
        ("64KiB", 65_536),
        ("1 MiB", 1_048_576),
        ("64 MiB", 67_108_864),
        ("67108864", 67_108_864),
    ] {
        assert_eq!(
            flag("part_bytes", text).settings().part_bytes,
            bytes,
            "{text}"
        );
    }
    assert_eq!(parse::bytes("2GiB", u64::MAX), Ok(2_147_483_648));
    let bad = [
        "0",
        "67108865",
        "65 MiB",
        "1 GiB",
        "1MB",
        "1 mib",
        "MiB",
        "1  MiB",
        "-1",
        "1.5 MiB",
        "",
        "18446744073709551615 GiB",
        // 2^64 + 1024 bytes.
        "18014398509481985 KiB",
    ];
    for text in bad {
        assert_eq!(
            reason("part_bytes", text),
            "it must be from 1 byte to 64 MiB, written as plain bytes or with KiB, MiB or GiB, \
             as 1048576 or 1 MiB",
        );
    }
}

#[test]
fn an_address_is_an_ip_or_localhost_with_a_port() {
    for (text, address) in [
        ("0.0.0.0:80", "0.0.0.0:80"),
        ("[::1]:8787", "[::1]:8787"),
        ("localhost:0", "127.0.0.1:0"),
    ] {
        assert_eq!(
            flag("listen", text).settings().listen,
            address.parse().unwrap()
        );
    }
    for bad in [
        "",
        "8787",
        ":8787",
        "127.0.0.1",
        "localhost",
        "localhost:+1",
        "chat.example:80",
    ] {
        assert!(reason("listen", bad).starts_with("it must be IP:PORT or localhost:PORT"));
    }
}

#[test]
fn a_public_url_is_absolute_and_loses_its_last_slash() {
    for (text, url) in [
        ("https://chat.example", "https://chat.example"),
        ("https://chat.example/", "https://chat.example"),
        (
            "HTTP://chat.example:8080/a/b%20c/",
            "http://chat.example:8080/a/b%20c",
        ),
        ("http://[::1]:8787", "http://[::1]:8787"),
        ("http://[::1]", "http://[::1]"),
    ] {
        assert_eq!(
            flag("public_url", text).settings().public_url.as_deref(),
            Some(url)
        );
    }
    let bad = [
        "chat.example",
        "/exports",
        "ftp://chat.example",
        "https://",
        "https:///x",
        "https://:80",
        "https://chat.example:0",
        "https://chat.example:65536",
        "https://chat.example:",
        "https://chat example",
        "https://[::1",
        "https://a/b c",
        "https://a/%2",
        "https://a/%zz",
        "https://a/\"",
        "https://café.example",
        "https://.",
        "//chat.example",
    ];
    for text in bad {
        let expected = "it must be an absolute http or https URL without user, query and fragment";
        assert!(reason("public_url", text).starts_with(expected), "{text}");
    }
    for text in [
        "https://a/?x=1",
        "https://a?x",
        "https://a/#x",
        "https://user@a/",
    ] {
        assert_eq!(flag("public_url", text).problems().len(), 1, "{text}");
    }
}

#[test]
fn an_empty_public_url_takes_back_that_of_the_file() {
    let case = Case::with_file("public_url = \"https://chat.example\"");
    assert_eq!(
        case.settings().public_url.as_deref(),
        Some("https://chat.example")
    );
    let case = case.variable("IBID_PUBLIC_URL", "");
    assert_eq!(case.settings().public_url, None);
    assert_eq!(case.entry("public_url").value, None);
}

#[test]
fn a_database_is_a_file_of_sqlite_or_an_address_of_postgresql() {
    for url in [
        "postgres://host/ibid",
        "postgresql://host/ibid",
        "POSTGRES://host",
    ] {
        let settings = Case::new().variable("IBID_DATABASE", url).settings();
        assert_eq!(settings.database, Database::Postgres(url.to_owned()));
    }
    let case = Case::new().variable("IBID_SOURCE", "postgres://host/chat");
    let chat = Database::Postgres("postgres://host/chat".to_owned());
    let settings = case.settings();
    assert_eq!(settings.log_elsewhere(), Some(&chat));
    assert_eq!(settings.databases().nth(1), Some(&chat));
    let same = case.variable("IBID_DATABASE", "postgres://host/chat");
    assert_eq!(same.settings().log_elsewhere(), None);
    let none = Case::new().variable("IBID_SOURCE", "").settings();
    assert_eq!(none.databases().collect::<Vec<_>>(), [&none.database]);
    let secret = Database::Postgres("postgres://me:hunter2@host/db".to_owned());
    assert!(!format!("{secret:?}").contains("hunter2"));
    for bad in [
        "",
        "sqlite:",
        "/srv/ibid.db",
        "mysql://host",
        "sqlite::memory:",
        "sqlite:file:x",
        "sqlite:///srv/ibid.db",
        "sqlite:a\u{0}b",
    ] {
        assert!(
            reason("database", bad).starts_with("it must be sqlite:PATH"),
            "{bad}"
        );
    }
}

#[test]
fn artefacts_are_in_a_folder_or_in_an_object_store_with_its_own_variables() {
    for url in ["s3://bucket/prefix", "gs://bucket", "az://container/a/b"] {
        let case = Case::new()
            .variable("IBID_ARTIFACTS", url)
            .variable("AWS_SECRET_ACCESS_KEY", "hunter2")
            .variable("OTHER", "x");
        let Artifacts::Store { url: kept, options } = case.settings().artifacts else {
            panic!("{url}");
        };
        assert_eq!(kept, url);
        let options: Vec<_> = options.iter().collect();
        assert_eq!(options, [("AWS_SECRET_ACCESS_KEY", "hunter2")]);
        assert!(!format!("{:?}", case.settings()).contains("hunter2"));
    }
    for bad in [
        "",
        "file:",
        "/srv/artifacts",
        "file:///srv/artifacts",
        "s3://",
        "S3://bucket",
    ] {
        assert!(
            reason("artifacts", bad).starts_with("it must be file:PATH"),
            "{bad}"
        );
    }
}

#[test]
fn the_free_space_that_is_left_may_be_none() {
    let free = |text| flag("min_free_bytes", text).settings().min_free;
    assert_eq!((free("0"), free("1 GiB")), (0, 1 << 30));
    assert!(reason("min_free_bytes", "x").ends_with("0 is no limit"));
}

#[test]
fn a_path_is_neither_empty_nor_has_control_characters() {
    for bad in ["", "a\u{0}b", "a\nb"] {
        assert_eq!(
            reason("signing_keys", bad),
            "it must be a path without control characters"
        );
    }
    assert!(flag("data", "").problems()[0].starts_with("data = \"\" (flag --data) cannot work"));
}

#[test]
fn a_record_lives_at_least_as_long_as_its_artefact() {
    flag("retention_days", "90").settings();
    assert_eq!(
        Case::with_file("record_days = 5").problems(),
        [
            "record_days = \"5\" (DIR/ibid.toml, line 1) cannot work: it must be at least \
          retention_days, which is \"7\" (default); raise the one or lower the other"
        ]
    );
    assert_eq!(
        flag("retention_days", "91").problems(),
        [
            "record_days = \"90\" (default) cannot work: it must be at least retention_days, which \
          is \"91\" (flag --retention-days); raise the one or lower the other"
        ]
    );
}

#[test]
fn a_value_of_the_wrong_type_is_refused() {
    let case = Case::with_file(
        "listen = 8787\nworkers = 1.5\nlease_seconds = true\ndatabase = []\nmax_attempts = {}\n\
         public_url = 2026-01-05\npoll_seconds = \"2\"\ndrain_seconds = 0x10\nlink_seconds = 1_0",
    );
    assert_eq!(
        case.problems(),
        [
            "listen = 8787 (DIR/ibid.toml, line 1) cannot work: it must be text, in quotes",
            "public_url (DIR/ibid.toml, line 6) cannot work: it is a date and must be text, in \
             quotes",
            "database (DIR/ibid.toml, line 4) cannot work: it is a list and must be text, in \
             quotes",
            "workers (DIR/ibid.toml, line 2) cannot work: it is a fraction and must be a whole \
             number",
            "lease_seconds (DIR/ibid.toml, line 3) cannot work: it is a boolean and must be a \
             whole number",
            "max_attempts (DIR/ibid.toml, line 5) cannot work: it is a table and must be a whole \
             number",
        ]
    );
    let settings =
        Case::with_file("poll_seconds = \"2\"\ndrain_seconds = 0x10\nlink_seconds = 1_0")
            .settings();
    let seconds = [settings.poll, settings.drain, settings.link].map(|time| time.as_secs());
    assert_eq!(seconds, [2, 16, 10]);
    assert_eq!(
        Case::with_file("link_seconds = -5\nworkers = 0xffffffffffffffffffffffffffffffffffff")
            .problems()
            .len(),
        2
    );
}

#[test]
fn every_key_that_counts_takes_a_bare_number() {
    let counts = |key: &&Key| {
        matches!(key.name, "part_bytes" | "min_free_bytes")
            || key.default.value(Path::new("")).parse::<u64>().is_ok()
    };
    let lines: Vec<String> = KEYS
        .iter()
        .filter(counts)
        .map(|key| format!("{} = 9\n", key.name))
        .collect();
    assert_eq!(lines.len(), 15);
    Case::with_file(&lines.concat()).settings();
}

#[test]
fn credentials_in_a_value_are_not_shown() {
    for (key, value, shown) in [
        (
            "artifacts",
            "postgres://me:hunter2@host/db",
            "postgres://...",
        ),
        (
            "artifacts",
            "postgres://me:p?hunter2@host/db",
            "postgres://...",
        ),
        (
            "artifacts",
            "postgres://host/db?password=hunter2",
            "postgres://host/db?...",
        ),
        ("artifacts", "host=db Password=hunter2", "..."),
        ("artifacts", "s3://key:hunter2@bucket", "s3://..."),
        (
            "public_url",
            "https://me:hunter2@chat.example",
            "https://...",
        ),
        (
            "public_url",
            "https://chat.example/#hunter2",
            "https://chat.example/#...",
        ),
    ] {
        let problems = flag(key, value).problems();
        assert!(
            problems[0].starts_with(&format!("{key} = {shown:?} (")),
            "{problems:?}"
        );
        assert!(!problems[0].contains("hunter2"), "{problems:?}");
    }
}

#[test]
fn who_sends_downloads_must_have_them() {
    assert_eq!(flag("offload", "none").settings().offload, Offload::None);
    for store in ["s3://bucket/x", "gs://bucket", "az://container"] {
        let case = flag("offload", "presigned").flag("artifacts", store);
        assert_eq!(case.settings().offload, Offload::Presigned, "{store}");
    }
    for bad in ["", "Presigned", "x-accel", "true"] {
        assert_eq!(reason("offload", bad), "it must be none or presigned");
    }
    let case = Case::with_file("offload = \"presigned\"\nartifacts = \"file:/srv/a\"\n");
    let problems = case.problems();
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!(
        problems[0],
        "offload = \"presigned\" (DIR/ibid.toml, line 1) cannot work: artifacts, which is \
         \"file:/srv/a\" (DIR/ibid.toml, line 2), is a folder, and only an object store serves \
         downloads by itself; name one (s3://, gs://, az://), or leave offload out"
    );
    // Also the folder that nobody has named.
    let default = flag("offload", "presigned").problems();
    assert!(default[0].starts_with("offload = \"presigned\" (flag --offload) cannot work"));
}

#[test]
fn the_port_of_the_metrics_is_an_address_or_none() {
    assert_eq!(flag("metrics_listen", "").settings().metrics_listen, None);
    let given = flag("metrics_listen", "0.0.0.0:9100").settings();
    assert_eq!(given.metrics_listen, "0.0.0.0:9100".parse().ok());
    assert!(reason("metrics_listen", "9100").starts_with("it must be IP:PORT"));
}

#[test]
fn certificate_and_key_are_given_together() {
    let both = flag("tls_cert", "c.pem")
        .flag("tls_key", "k.pem")
        .settings();
    assert_eq!(both.tls_cert.as_deref(), Some(Path::new("c.pem")));
    assert_eq!(both.tls_key.as_deref(), Some(Path::new("k.pem")));
    for (given, missing) in [("tls_cert", "tls_key"), ("tls_key", "tls_cert")] {
        let expected =
            format!("{missing} is not given, and TLS takes both; give it too, or leave both out");
        assert_eq!(reason(given, "x.pem"), expected);
        assert_eq!(flag(given, "").settings().tls_cert, None);
    }
}

#[test]
fn origins_are_exact_and_never_all() {
    let none = flag("cors_origins", "").settings().cors_origins;
    assert!(none.is_empty());
    let two = ["https://chat.example", "http://localhost:3000"];
    for text in [two.join(","), two.join(" , ") + ","] {
        assert_eq!(flag("cors_origins", &text).settings().cors_origins, two);
    }
    let list =
        Case::with_file("cors_origins = [\"https://chat.example\", \"http://localhost:3000\"]");
    assert_eq!(list.settings().cors_origins, two);
    let origin = list.entry("cors_origins");
    assert_eq!(
        origin.value.as_deref(),
        Some("https://chat.example, http://localhost:3000")
    );
    let all = "it must name the origins one by one, since exports are not for every web page";
    assert_eq!(reason("cors_origins", "*"), all);
    assert_eq!(reason("cors_origins", "https://a.example, *"), all);
    for bad in [
        "null",
        "chat.example",
        "https://",
        "https://chat.example/",
        "https://chat.example/path",
        "https://Chat.example",
        "HTTPS://chat.example",
        "https://chat.example:443",
        "http://chat.example:80",
        "https://*.example",
        "ftp://chat.example",
        "https://chat.example https://b.example",
    ] {
        let reason = reason("cors_origins", bad);
        assert!(
            reason.starts_with("it must be origins as browsers send them"),
            "{bad}: {reason}"
        );
    }
    for (text, problem) in [
        (
            "cors_origins = [1]",
            "it is a list, but not one of such texts, and must be a list of texts, each in quotes",
        ),
        (
            "cors_origins = [\"a,b\"]",
            "it is a list, but not one of such texts, and must be a list of texts, each in quotes",
        ),
        ("cors_origins = 7", "it must be text, in quotes"),
        (
            "listen = [\"127.0.0.1:1\"]",
            "it is a list and must be text, in quotes",
        ),
        (
            "workers = [\"1\"]",
            "it is a list and must be a whole number",
        ),
    ] {
        let problems = Case::with_file(text).problems();
        assert!(
            problems[0].ends_with(&format!("cannot work: {problem}")),
            "{problems:?}"
        );
    }
}
