//! The example of the demo.

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::events::{join, leave, recall, say};
use crate::harness::Installation;

fn story() -> Vec<String> {
    let says = |conv: &'static str, from: u64, to: u64| {
        (from..=to).map(move |number| say(conv, &format!("{conv} {number}")))
    };
    let mut lines: Vec<String> = says("c-team", 1, 50).collect();
    lines.push(join("c-team", "u0007"));
    lines.extend(says("c-team", 51, 550));
    lines.push(join("c-big", "u0007"));
    lines.extend(says("c-big", 1, 430));
    lines.push(leave("c-big", "u0007"));
    lines.extend(says("c-big", 431, 440));
    lines.push(join("c-private", "bob"));
    lines.extend(says("c-private", 1, 20));
    lines.push(recall("c-team", 60));
    lines
}

fn afterwards() -> Vec<String> {
    vec![recall("c-team", 70), say("c-team", "c-team 551")]
}

#[tokio::test]
async fn the_sample_holds_what_the_user_could_see_at_the_moment_of_creation() {
    let home = Installation::new();
    home.import(&story()).await;
    let job = home.export("u0007", "all").await;
    home.import(&afterwards()).await;
    home.work().await;

    let lines = String::from_utf8(home.lines(job).await).unwrap();
    let found: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |conv: &'static str, seqs: std::ops::RangeInclusive<u64>| {
        seqs.map(move |seq| (conv.to_owned(), seq))
    };
    let places: Vec<(String, u64)> = found
        .iter()
        .map(|line| {
            let conv = line["conv"].as_str().unwrap().to_owned();
            (conv, line["seq"].as_u64().unwrap())
        })
        .collect();
    let expected: Vec<_> = of("c-big", 1..=430).chain(of("c-team", 51..=550)).collect();
    assert_eq!(places, expected);
    for line in &found {
        let (conv, seq) = (line["conv"].as_str().unwrap(), line["seq"].as_u64());
        let recalled = (conv, seq) == ("c-team", Some(60));
        let text = if recalled {
            String::new()
        } else {
            format!("{conv} {}", seq.unwrap())
        };
        assert_eq!(line["body"].as_str(), Some(text.as_str()), "{line}");
        assert_eq!(line["recalled"], u64::from(recalled), "{line}");
        assert_eq!(line["edited"], 0, "{line}");
    }

    let export = home.find(job).await.export;
    let artefact = home.artefact(job).await;
    assert_eq!(export.messages_total, 930);
    assert_eq!(artefact.messages, 930);
    assert_eq!(artefact.bytes, home.file(job).await.len() as u64);
}

#[tokio::test]
async fn what_is_created_later_holds_what_happened_meanwhile() {
    let home = Installation::new();
    home.import(&story()).await;
    home.import(&afterwards()).await;
    let lines = String::from_utf8(home.export_now("u0007", "conv:c-team").await).unwrap();
    let seventy: Value = serde_json::from_str(lines.lines().nth(19).unwrap()).unwrap();
    assert_eq!(seventy["seq"], 70);
    assert_eq!(
        (&seventy["body"], &seventy["recalled"]),
        (&"".into(), &1.into())
    );
    assert!(lines.ends_with('\n'));
    assert!(lines.lines().last().unwrap().contains("\"c-team 551\""));
    assert_eq!(lines.lines().count(), 501);
}

#[tokio::test]
async fn a_conversation_without_a_stay_and_one_that_is_not_there_are_refused_alike() {
    let home = Installation::new();
    home.import(&story()).await;
    for scope in ["conv:c-private", "conv:c-none"] {
        let refused = home.create("u0007", scope, "key").await.unwrap_err();
        assert_eq!(
            refused.to_string(),
            "there is no such conversation for this user"
        );
    }
}

/// Decoders that other people wrote read it too, of which at least gzip is everywhere.
#[tokio::test]
async fn gzip_and_python_read_the_artefact() {
    let home = Installation::cutting_at(100);
    home.import(&story()).await;
    let job = home.export("u0007", "all").await;
    let nothing = home.export("nobody", "all").await;
    home.work().await;
    assert_eq!(home.artefact(job).await.parts, 10);
    assert_eq!(home.lines(nothing).await, b"");

    let python =
        "import gzip,sys; sys.stdout.buffer.write(gzip.decompress(sys.stdin.buffer.read()))";
    for (program, arguments) in [("gzip", ["-d", "-c"]), ("python3", ["-c", python])] {
        for of in [job, nothing] {
            match piped(program, &arguments, home.file(of).await) {
                Some(raw) => assert_eq!(raw, home.lines(of).await, "{program}"),
                None => assert_ne!(program, "gzip", "it is not installed"),
            }
        }
    }
}

/// What a program makes of `input`, or `None` where there is no such program.
fn piped(program: &str, arguments: &[&str], input: Vec<u8>) -> Option<Vec<u8>> {
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = child.ok()?;
    let mut stdin = child.stdin.take().unwrap();
    let feeding = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    feeding.join().unwrap().unwrap();
    assert!(output.status.success(), "{program}: {}", output.status);
    Some(output.stdout)
}
