mod shown;
mod values;

use std::ffi::OsString;
use std::fs;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde_json::json;
use tempfile::TempDir;

use super::keys::{Fallback, KEYS};
use super::*;

/// A folder of its own for one test, with what is asked of the module from there.
struct Case {
    folder: TempDir,
    flags: Vec<(&'static str, String)>,
    variables: Vec<(&'static str, String)>,
}

impl Case {
    fn new() -> Case {
        Case {
            folder: tempfile::tempdir().unwrap(),
            flags: Vec::new(),
            variables: Vec::new(),
        }
    }

    /// With its data folder given as a flag, and this `ibid.toml` in it.
    fn with_file(text: &str) -> Case {
        let case = Case::new();
        fs::write(case.path("ibid.toml"), text).unwrap();
        let data = case.path("");
        case.flag("data", data.to_str().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn flag(mut self, key: &'static str, value: &str) -> Case {
        self.flags.push((key, value.to_owned()));
        self
    }

    fn variable(mut self, name: &'static str, value: &str) -> Case {
        self.variables.push((name, value.to_owned()));
        self
    }

    fn resolve(&self) -> Result<Config, ConfigError> {
        let flags: Flags = self.flags.iter().cloned().collect();
        let environment: Environment = self.variables.iter().cloned().collect();
        Config::resolve(&flags, &environment)
    }

    fn settings(&self) -> Settings {
        self.resolve().unwrap().settings
    }

    /// The problems, with the test's folder written as `DIR`.
    fn problems(&self) -> Vec<String> {
        let folder = self.folder.path().to_str().unwrap();
        let error = self.resolve().unwrap_err();
        let lines = error.problems().iter();
        lines.map(|line| line.replace(folder, "DIR")).collect()
    }

    fn entry(&self, key: &str) -> Entry {
        let config = self.resolve().unwrap();
        config
            .entries()
            .find(|entry| entry.key == key)
            .unwrap()
            .clone()
    }
}

fn flag(key: &'static str, value: &str) -> Case {
    Case::new().flag(key, value)
}

/// Why `value` is refused for `key`: what stands behind the colon.
fn reason(key: &'static str, value: &str) -> String {
    let problems = flag(key, value).problems();
    assert_eq!(problems.len(), 1, "{problems:?}");
    let start = format!("{key} = {value:?} (flag {}) cannot work: ", keys::flag(key));
    problems[0]
        .strip_prefix(&start)
        .unwrap_or_else(|| panic!("{problems:?}"))
        .to_owned()
}

fn limited(number: u32) -> Option<NonZeroU32> {
    NonZeroU32::new(number)
}

#[test]
fn every_default_is_that_of_the_contract() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let expected = Settings {
        data: PathBuf::from("./ibid-data"),
        listen: "127.0.0.1:8787".parse().unwrap(),
        public_url: None,
        database: sqlite("./ibid-data/ibid.db"),
        source: None,
        artifacts: Artifacts::Folder(PathBuf::from("./ibid-data/artifacts")),
        workers: 1,
        render_threads: cores,
        part_bytes: 1_048_576,
        part_messages: None,
        lease: Duration::from_secs(30),
        max_attempts: 5,
        poll: Duration::from_secs(1),
        link: Duration::from_secs(300),
        retention: Duration::from_secs(7 * 86_400),
        record: Duration::from_secs(90 * 86_400),
        unfinished_per_user: limited(3),
        exports_per_user_per_day: limited(20),
        running_per_user: limited(2),
        offload: Offload::None,
        min_free: 256 << 20,
        signing_keys: PathBuf::from("./ibid-data/keys"),
        tls_cert: None,
        tls_key: None,
        cors_origins: Vec::new(),
        metrics_listen: None,
        drain: Duration::from_secs(10),
    };
    let config = Config::resolve(&Flags::default(), &Environment::default()).unwrap();
    assert_eq!(config.settings, expected);
    assert!(
        config
            .entries()
            .all(|entry| entry.origin == Origin::Default)
    );
    assert!(config.entries().map(|entry| entry.key).eq(keys::names()));
}

#[test]
fn a_flag_beats_the_environment_beats_the_file_beats_the_default() {
    let none = Case::with_file("");
    assert_eq!(none.settings().link, Duration::from_secs(300));
    assert_eq!(none.entry("link_seconds").origin, Origin::Default);

    let file = Case::with_file("# lifetime\nlink_seconds = 100\n");
    assert_eq!(file.settings().link, Duration::from_secs(100));
    let path = file.path("ibid.toml");
    assert_eq!(
        file.entry("link_seconds").origin,
        Origin::File { path, line: 2 }
    );

    let variable = file.variable("IBID_LINK_SECONDS", "200");
    assert_eq!(variable.settings().link, Duration::from_secs(200));
    assert_eq!(
        variable.entry("link_seconds").origin,
        Origin::Environment {
            variable: "IBID_LINK_SECONDS".to_owned()
        }
    );

    let flag = variable.flag("link_seconds", "400");
    assert_eq!(flag.settings().link, Duration::from_secs(400));
    assert_eq!(flag.entry("link_seconds").origin, Origin::Flag);
}

#[test]
fn only_the_value_that_wins_is_judged() {
    let case = Case::with_file("link_seconds = true").variable("IBID_LINK_SECONDS", "9000");
    assert_eq!(case.problems().len(), 1);
    assert_eq!(
        case.flag("link_seconds", "60").settings().link,
        Duration::from_secs(60)
    );
}

#[test]
fn every_key_can_be_given_by_each_source() {
    for key in &KEYS {
        let value = match key.default.value(Path::new("/d")) {
            none if none.is_empty() && key.name == "source" => "sqlite:/srv/log.db".to_owned(),
            none if none.is_empty() && key.name == "metrics_listen" => "[::1]:0".to_owned(),
            none if none.is_empty() => "https://chat.example".to_owned(),
            value => value,
        };
        // One of the pair cannot work alone.
        let beside = match key.name {
            "tls_cert" => Some(("tls_key", "other.pem")),
            "tls_key" => Some(("tls_cert", "other.pem")),
            _ => None,
        };
        let case = || {
            let case = Case::new();
            match beside {
                Some((other, value)) => case.flag(other, value),
                None => case,
            }
        };
        // Under another name, since a found file may not name a data folder.
        let in_file = case();
        let file = in_file.path("settings.toml");
        fs::write(&file, format!("{} = {value:?}", key.name)).unwrap();
        let in_file = in_file.flag("config", file.to_str().unwrap());
        assert_eq!(
            in_file.entry(key.name).origin,
            Origin::File {
                path: file,
                line: 1
            }
        );
        let by_flag = case().flag(key.name, &value);
        assert_eq!(by_flag.entry(key.name).origin, Origin::Flag);

        let variable = keys::variable(key.name);
        let environment = Environment::from_iter([(variable.clone(), value)]);
        let flags: Flags = case().flags.into_iter().collect();
        let config = Config::resolve(&flags, &environment).unwrap();
        let entry = config
            .entries()
            .find(|entry| entry.key == key.name)
            .unwrap();
        assert_eq!(entry.origin, Origin::Environment { variable });
    }
}

#[test]
fn paths_that_are_not_given_follow_the_data_folder() {
    let settings = flag("data", "/srv/ibid/").settings();
    assert_eq!(settings.database, sqlite("/srv/ibid/ibid.db"));
    assert_eq!(
        settings.artifacts.folder(),
        Some(Path::new("/srv/ibid/artifacts"))
    );
    assert_eq!(settings.signing_keys, Path::new("/srv/ibid/keys"));

    let settings = flag("data", "some/where")
        .flag("database", "sqlite:other.db")
        .settings();
    assert_eq!(settings.database, sqlite("other.db"));
    assert_eq!(
        settings.artifacts.folder(),
        Some(Path::new("some/where/artifacts"))
    );
}

#[test]
fn the_named_file_replaces_the_one_in_the_data_folder() {
    let case = Case::with_file("workers = 2\nmax_attempts = 2");
    let named = case.path("named.toml");
    fs::write(&named, "workers = 3").unwrap();
    let case = case.variable("IBID_CONFIG", named.to_str().unwrap());
    assert_eq!(
        (case.settings().workers, case.settings().max_attempts),
        (3, 5)
    );

    let other = case.path("other.toml");
    fs::write(&other, "workers = 4").unwrap();
    let case = case.flag("config", other.to_str().unwrap());
    assert_eq!(case.settings().workers, 4);
}

#[test]
fn the_named_file_may_name_the_data_folder() {
    let case = Case::new();
    let named = case.path("named.toml");
    fs::write(&named, "data = \"/srv/ibid\"").unwrap();
    let case = case.flag("config", named.to_str().unwrap());
    assert_eq!(case.settings().database, sqlite("/srv/ibid/ibid.db"));
}

#[test]
fn a_found_file_may_not_lead_to_another_data_folder() {
    // Only the default folder is found with nothing given, so this one door is
    // entered behind the front.
    let find = |text: &str| {
        let case = Case::with_file(text);
        let mut problems = Vec::new();
        file::found(&case.path(""), &Layer::new(), &mut problems);
        problems
    };
    let problems = find("data = \"/elsewhere\"");
    assert_eq!(problems.len(), 1);
    assert!(
        problems[0].starts_with("data = \"/elsewhere\" ("),
        "{problems:?}"
    );
    assert!(
        problems[0].contains("use --data or IBID_DATA"),
        "{problems:?}"
    );
    assert_eq!(find("workers = 2"), [""; 0]);

    let case = Case::with_file("");
    fs::write(
        case.path("ibid.toml"),
        format!("data = {:?}", case.folder.path()),
    )
    .unwrap();
    let mut problems = Vec::new();
    file::found(&case.path(""), &Layer::new(), &mut problems);
    assert_eq!(problems, [""; 0]);
}

#[test]
fn a_data_folder_given_by_flag_wins_over_that_of_the_file_in_it() {
    let case = Case::with_file("data = \"/elsewhere\"");
    assert_eq!(case.settings().data, case.folder.path());
}

#[test]
fn a_bad_value_is_refused_with_key_value_origin_and_reason() {
    let reason = "cannot work: it must be a whole number from 1 to 3600";
    assert_eq!(
        Case::new().variable("IBID_LINK_SECONDS", "9000").problems(),
        [format!(
            "link_seconds = \"9000\" (environment variable IBID_LINK_SECONDS) {reason}"
        )]
    );
    assert_eq!(
        flag("link_seconds", "soon").problems(),
        [format!(
            "link_seconds = \"soon\" (flag --link-seconds) {reason}"
        )]
    );
    assert_eq!(
        Case::with_file("\n\nlink_seconds = 0").problems(),
        [format!("link_seconds = 0 (DIR/ibid.toml, line 3) {reason}")]
    );
    assert_eq!(
        flag("data", "file:x").problems(),
        [
            "database = \"sqlite:file:x/ibid.db\" (default) cannot work: it must be sqlite:PATH \
          with the path of a file, as sqlite:/srv/ibid/ibid.db, or the address of a PostgreSQL database, as postgres://ibid@localhost/ibid"
        ]
    );
}

#[test]
fn unknown_keys_and_flags_are_refused_with_the_nearest_known_one() {
    let case = Case::with_file("workers = 2\nlink-seconds = 5\n\n[server]\nlisten = \"x\"")
        .flag("drain_second", "5");
    assert_eq!(
        case.problems(),
        [
            "the flag --drain-second is not a setting: write --drain-seconds or remove it",
            "link-seconds (DIR/ibid.toml, line 2) is not a setting: write link_seconds or remove \
             it",
            "server (DIR/ibid.toml, line 4) is not a setting: remove it (`ibid config` lists all \
             that are)",
        ]
    );
    assert_eq!(
        Case::with_file("config = \"x\"\ntoken = \"x\"")
            .problems()
            .len(),
        2
    );
}

#[test]
fn unknown_variables_are_ignored_with_a_warning() {
    let case = Case::new()
        .variable("IBID_LNK_SECONDS", "5")
        .variable("IBID_PORT", "tcp://10.0.0.1:8787")
        .variable("IBID_SERVICE_HOST", "10.0.0.1")
        .variable("IBID_SERVICE_PORT_HTTP", "8787")
        .variable("IBID_TOKN", "hunter2")
        .variable("IBID_ZEBRA\nX", "5")
        .variable("IBID_link_seconds", "7");
    let config = case.resolve().unwrap();
    assert_eq!(config.settings.link, Duration::from_secs(300));
    let ignored = |name: &str, advice: &str| {
        format!("the environment variable {name} is ignored, since it is no setting{advice}")
    };
    assert_eq!(
        config.warnings(),
        [
            ignored(
                "IBID_LNK_SECONDS",
                ": write IBID_LINK_SECONDS if that is meant"
            ),
            ignored("IBID_PORT", ""),
            ignored("IBID_SERVICE_HOST", ""),
            ignored("IBID_SERVICE_PORT_HTTP", ""),
            ignored("IBID_TOKN", ": write IBID_TOKEN if that is meant"),
            ignored("IBID_ZEBRA\\nX", ""),
            ignored(
                "IBID_link_seconds",
                ": write IBID_LINK_SECONDS if that is meant"
            ),
        ]
    );
    assert_eq!(Case::new().resolve().unwrap().warnings(), [""; 0]);
}

#[test]
fn a_name_is_near_within_a_slip_or_two_for_its_length() {
    let nearest = |name| parse::nearest(name, keys::names());
    for name in ["dta", "daata", "dota", "DATA"] {
        assert_eq!(nearest(name), Some("data"), "{name}");
    }
    assert_eq!(nearest("Retention-Day"), Some("retention_days"));
    for name in ["dt", "", "host", "dota_x"] {
        assert_eq!(nearest(name), None, "{name}");
    }
}

#[test]
fn variables_that_are_no_settings_are_left_alone() {
    let case = Case::new()
        .variable("IBID_TOKEN", "ibid_x")
        .variable("IBID_SERVER", "http://localhost:8787")
        .variable("IBID_LOG", "debug")
        .variable("IBID_TEST_CLOCK", "1")
        .variable("PATH", "/bin");
    case.settings();
    let environment: Environment = case.variables.iter().cloned().collect();
    assert_eq!(environment.get("IBID_TOKEN"), Some("ibid_x"));
    assert_eq!(environment.get("PATH"), None);
}

#[test]
fn a_named_file_that_is_not_there_is_refused() {
    let path = "/nowhere/ibid.toml";
    assert_eq!(
        flag("config", path).problems(),
        [
            "the configuration file \"/nowhere/ibid.toml\" (flag --config) does not exist: correct \
          its path or name none"
        ]
    );
    assert_eq!(
        Case::new().variable("IBID_CONFIG", path).problems(),
        [
            "the configuration file \"/nowhere/ibid.toml\" (environment variable IBID_CONFIG) does \
          not exist: correct its path or name none"
        ]
    );
}

#[test]
fn a_file_that_cannot_be_read_is_refused() {
    let case = Case::new();
    fs::create_dir(case.path("ibid.toml")).unwrap();
    let data = case.folder.path().to_str().unwrap().to_owned();
    let problems = case.flag("data", &data).problems();
    assert_eq!(problems.len(), 1);
    assert!(
        problems[0].starts_with("the configuration file \"DIR/ibid.toml\" cannot be read: "),
        "{problems:?}"
    );
}

#[test]
fn a_file_that_is_not_toml_is_refused_with_its_line_and_without_its_text() {
    for (text, line) in [
        ("workers = 1\npublic_url = \"hunter2\nlisten = \"x\"\n", 2),
        ("workers = 1\n\nhunter2\n", 3),
        ("workers =\nlisten = \"hunter2\"", 1),
        ("workers = 1\nworkers = 2", 2),
        ("[hunter2\n", 1),
    ] {
        let problems = Case::with_file(text).problems();
        assert_eq!(problems.len(), 1, "{problems:?}");
        let start = format!("DIR/ibid.toml, line {line}: this is not TOML (");
        assert!(problems[0].starts_with(&start), "{text:?}: {problems:?}");
        assert!(!problems[0].contains("hunter2"), "{problems:?}");
    }
}

#[test]
fn a_file_that_is_not_utf8_is_refused_with_its_line() {
    let case = Case::with_file("");
    fs::write(
        case.path("ibid.toml"),
        b"workers = 1\npublic_url = \"\xff\"",
    )
    .unwrap();
    assert_eq!(
        case.problems(),
        ["DIR/ibid.toml, line 2: this is not UTF-8; save the file as UTF-8"]
    );
}

#[cfg(unix)]
#[test]
fn a_variable_that_is_not_utf8_is_refused_if_it_means_something() {
    use std::os::unix::ffi::OsStringExt;
    let bad = || OsString::from_vec(vec![0xff]);
    let error = Environment::from_os([("IBID_DATA".into(), bad())]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the environment variable IBID_DATA is not UTF-8: set it to text, or unset it"
    );
    let others = [
        ("OTHER".into(), bad()),
        (bad(), bad()),
        ("IBID_PORT".into(), bad()),
    ];
    let environment = Environment::from_os(others).unwrap();
    assert_eq!(format!("{environment:?}"), r#"{"IBID_PORT"}"#);
}

#[test]
fn all_problems_are_reported_together_a_line_each() {
    let case = Case::with_file("link_seconds = 0\nrecord_days = 3\nbogus = 1")
        .variable("IBID_WORKERS", "many")
        .flag("bogus\nname", "x")
        .flag("listen", "nowhere");
    let problems = case.problems();
    let starts: Vec<&str> = problems
        .iter()
        .map(|line| line.split([' ', ':']).next().unwrap())
        .collect();
    assert_eq!(
        starts,
        [
            "the",
            "bogus",
            "listen",
            "workers",
            "link_seconds",
            "record_days"
        ]
    );
    let text = case.resolve().unwrap_err().to_string();
    assert_eq!(text.lines().count(), problems.len());
}

#[test]
fn a_broken_file_does_not_hide_other_problems_or_make_some_up() {
    let case = Case::with_file("record_days = 200\noops")
        .flag("retention_days", "100")
        .flag("listen", "nowhere");
    let problems = case.problems();
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(problems[0].contains("line 2: this is not TOML"));
    assert!(problems[1].starts_with("listen = "));
}

fn sqlite(path: &str) -> Database {
    Database::Sqlite(PathBuf::from(path))
}
