//! What is told of the configuration: nothing secret, every key, every flag.

use super::*;

#[test]
fn a_secret_is_shown_nowhere() {
    const SECRET: Key = Key {
        name: "webhook_secret",
        means: "Signs webhooks",
        default: Fallback::Nothing,
        form: Form::Text,
        secret: true,
    };
    for value in [
        Written::Text("hunter2".to_owned()),
        Written::Number("hunter2".to_owned()),
    ] {
        let given = Given {
            value,
            origin: Origin::Flag,
        };
        let mut reading = Reading {
            given: Layer::from([("webhook_secret", given)]),
            data: PathBuf::new(),
            entries: Vec::new(),
            problems: Vec::new(),
        };
        let refused: Option<()> = reading.take(&SECRET, |_| Err("it must be longer".to_owned()));
        assert_eq!(refused, None);
        assert!(
            reading.problems[0].starts_with("webhook_secret = "),
            "{:?}",
            reading.problems
        );
        assert!(
            !reading.problems[0].contains("hunter2"),
            "{:?}",
            reading.problems
        );
    }

    let given = Given {
        value: Written::Text("hunter2".to_owned()),
        origin: Origin::Flag,
    };
    let mut reading = Reading {
        given: Layer::from([("webhook_secret", given)]),
        data: PathBuf::new(),
        entries: Vec::new(),
        problems: Vec::new(),
    };
    assert_eq!(reading.take(&SECRET, |text| Ok(text.len())), Some(7));
    assert_eq!(reading.entries[0].value.as_deref(), Some("(secret)"));

    let flags = Flags::from_iter([("webhook_secret", "hunter2")]);
    let environment = Environment::from_iter([("IBID_TOKEN", "hunter2")]);
    let serve = ServeFlags {
        listen: Some("hunter2".to_owned()),
        ..ServeFlags::default()
    };
    assert_eq!(
        format!("{flags:?} {environment:?} {serve:?}"),
        r#"{"webhook_secret"} {"IBID_TOKEN"} {"listen"}"#
    );
}

#[test]
fn the_configuration_prints_itself_as_a_table() {
    let case = Case::with_file("workers = 3").variable("IBID_LINK_SECONDS", "60");
    let table = case
        .resolve()
        .unwrap()
        .table()
        .replace(case.folder.path().to_str().unwrap(), "DIR");
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| {
            line.split("  ")
                .filter(|cell| !cell.is_empty())
                .map(str::trim)
                .collect()
        })
        .collect();
    assert_eq!(lines.len(), 1 + KEYS.len());
    assert_eq!(lines[0], ["KEY", "VALUE", "ORIGIN"]);
    for line in [
        ["data", "DIR/", "flag"],
        ["public_url", "none", "default"],
        ["workers", "3", "DIR/ibid.toml, line 1"],
        [
            "link_seconds",
            "60",
            "environment variable IBID_LINK_SECONDS",
        ],
    ] {
        assert!(lines.contains(&line.to_vec()), "{table}");
    }
    let default = Config::resolve(&Flags::default(), &Environment::default())
        .unwrap()
        .table();
    let columns = default
        .lines()
        .map(|line| line.find("default").or(line.find("ORIGIN")));
    assert!(
        columns
            .clone()
            .all(|column| column == columns.clone().next().unwrap()),
        "{default}"
    );
}

#[test]
fn the_configuration_prints_itself_as_json() {
    let config = flag("part_bytes", "2 MiB").resolve().unwrap();
    let json = config.json();
    assert_eq!(json.as_array().unwrap().len(), KEYS.len());
    assert_eq!(
        json[0],
        json!({"key": "data", "value": "./ibid-data", "origin": "default"})
    );
    assert_eq!(
        json[2],
        json!({"key": "public_url", "value": null, "origin": "default"})
    );
    assert_eq!(
        json[8],
        json!({"key": "part_bytes", "value": "2 MiB", "origin": "flag"})
    );
}

#[test]
fn every_key_has_one_flag_whose_help_names_its_default() {
    let command = StoreFlags::augment_args(Command::new("ibid"));
    let command = ServeFlags::augment_args(WorkFlags::augment_args(command));
    command.clone().debug_assert();
    let flags = || {
        command
            .get_arguments()
            .filter(|argument| argument.get_id() != "config")
    };
    assert_eq!(flags().count(), KEYS.len());
    for argument in flags() {
        let key = keys::find(argument.get_id().as_str()).unwrap();
        assert_eq!(
            format!("--{}", argument.get_long().unwrap()),
            keys::flag(key.name)
        );
        let help = argument.get_help().unwrap().to_string();
        assert_eq!(
            help,
            format!("{} [default: {}]", key.means.trim(), default_in_words(key))
        );
        assert!(argument.get_long_help().is_none());
    }
}

fn default_in_words(key: &Key) -> String {
    match key.name {
        "public_url" | "source" | "metrics_listen" | "tls_cert" | "tls_key" | "cors_origins" => {
            "none".to_owned()
        }
        "render_threads" => "cores".to_owned(),
        _ => key.default.value(Path::new("<data>")),
    }
}

#[test]
fn flags_of_all_sets_arrive_under_their_keys() {
    let command = StoreFlags::augment_args(Command::new("ibid"));
    let command = ServeFlags::augment_args(WorkFlags::augment_args(command));
    let line = [
        "ibid",
        "--data",
        "d",
        "--lease-seconds",
        "9",
        "--unfinished-per-user",
        "0",
    ];
    let matches = command.try_get_matches_from(line).unwrap();
    let store = StoreFlags::from_arg_matches(&matches).unwrap();
    let work = WorkFlags::from_arg_matches(&matches).unwrap();
    let serve = ServeFlags::from_arg_matches(&matches).unwrap();
    let flags = store.flags().merge(work.flags()).merge(serve.flags());
    assert_eq!(
        format!("{flags:?}"),
        r#"{"data", "lease_seconds", "unfinished_per_user"}"#
    );
    let settings = Config::resolve(&flags, &Environment::default())
        .unwrap()
        .settings;
    assert_eq!(settings.data, Path::new("d"));
    assert_eq!(settings.lease, Duration::from_secs(9));
    assert_eq!(settings.unfinished_per_user, None);
}

#[test]
fn a_command_keeps_its_own_text_when_it_takes_a_set() {
    #[derive(Parser)]
    struct Ibid {
        #[command(subcommand)]
        _command: Commands,
    }
    #[derive(Subcommand)]
    enum Commands {
        /// Inline.
        Inline {
            #[command(flatten)]
            _store: StoreFlags,
        },
        /// Apart.
        Apart(Apart),
        Own(Own),
        Bare {
            #[command(flatten)]
            _store: StoreFlags,
        },
    }
    #[derive(Args)]
    struct Apart {
        #[command(flatten)]
        _store: StoreFlags,
    }
    /// Own.
    #[derive(Args)]
    struct Own {
        #[command(flatten)]
        _store: StoreFlags,
    }
    let command = Ibid::command();
    let texts: Vec<_> = command
        .get_subcommands()
        .map(|one| one.get_about().map(ToString::to_string))
        .collect();
    let expected = [Some("Inline"), Some("Apart"), Some("Own"), None];
    assert_eq!(texts, expected.map(|text| text.map(str::to_owned)));
}
