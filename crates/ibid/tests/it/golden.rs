//! The bytes of artefacts, pinned: whoever changes them makes a new encoder or format.

use sha2::{Digest as _, Sha256};

use crate::events::{chat, edit, join, leave, recall, say};
use crate::harness::{Installation, On, on_both};

on_both! {
    a_small_artefact_is_the_same_to_the_byte_in_every_release,
    a_larger_artefact_is_the_same_to_the_byte_in_every_release,
    an_export_of_nothing_is_these_twenty_bytes,
}

const LINES: &str = concat!(
    r#"{"body":"two\n\u0000\"é😀","conv":"Zürich","edited":0,"recalled":0,"seq":2,"ts":"2026-01-05T09:30:00.000000Z","user":"bob"}"#,
    "\n",
    r#"{"body":"three","conv":"Zürich","edited":1,"recalled":0,"seq":3,"ts":"2026-01-05T09:30:00.000000Z","user":"bob"}"#,
    "\n",
    r#"{"body":"","conv":"a","edited":0,"recalled":1,"seq":1,"ts":"2026-01-05T09:30:00.000000Z","user":"bob"}"#,
    "\n",
);

fn small_log() -> Vec<String> {
    vec![
        say("Zürich", "one"),
        join("Zürich", "ann"),
        join("a", "ann"),
        say("a", "gone"),
        say("Zürich", "two\n\u{0}\"é😀"),
        say("Zürich", "3"),
        edit("Zürich", 3, "three"),
        leave("Zürich", "ann"),
        recall("a", 1),
        say("Zürich", "four"),
    ]
}

async fn artefact(on: &On, lines: &[String], part_messages: u64) -> (Vec<u8>, Vec<u8>) {
    let home = Installation::cutting(on, part_messages).await;
    home.import(lines).await;
    let job = home.export("ann", "all").await;
    home.work().await;
    assert_eq!(
        Sha256::digest(home.file(job).await)[..],
        home.artefact(job).await.sha256
    );
    (home.file(job).await, home.lines(job).await)
}

async fn a_small_artefact_is_the_same_to_the_byte_in_every_release(on: &On) {
    for (part_messages, expected) in [
        (
            0,
            "a5f0e09a740a09a1eefbf56bfe7c719a510457958f7c00b01ac69758c5eaeb73",
        ),
        (
            2,
            "be5bdf688faa395d24e6d3ffa062f06afaf339f4db910583d585a47df189d367",
        ),
    ] {
        let (file, lines) = artefact(on, &small_log(), part_messages).await;
        assert_eq!(String::from_utf8(lines).unwrap(), LINES);
        assert_eq!(
            hex::encode(Sha256::digest(&file)),
            expected,
            "{part_messages}"
        );
        assert_eq!(file[..10], [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255]);
    }
}

/// Enough text for the encoder to make choices.
async fn a_larger_artefact_is_the_same_to_the_byte_in_every_release(on: &On) {
    for (part_messages, expected) in [
        (
            0,
            "26d540f5056229a55a3e1772ba9c328bec711bfcbb87bf25bd190343593bc4c2",
        ),
        (
            200,
            "f69ddf8d7089249567f0ed63c0ed2a2d16bb2b67da7e2b337330856390df527d",
        ),
    ] {
        let (file, lines) = artefact(on, &chat(3_000), part_messages).await;
        let raw = "13f35e3d33194de382179f5eec3463c47ba746bc563aa28a852282ae633edc66";
        assert_eq!(hex::encode(Sha256::digest(&lines)), raw);
        assert_eq!(
            hex::encode(Sha256::digest(&file)),
            expected,
            "{part_messages}"
        );
    }
}

async fn an_export_of_nothing_is_these_twenty_bytes(on: &On) {
    let (file, lines) = artefact(on, &[], 0).await;
    assert_eq!(lines, b"");
    let empty = [
        0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    assert_eq!(file, empty);
}
