//! How the views are read, and what is refused.

use ibid::event::Event;
use ibid::ids::UserId;
use ibid::source::{Batch, SourceError};
use serde_json::Value;

use super::{Chat, PEOPLE};
use crate::events::{join, say};
use crate::harness::{create, import_into};
use crate::pg_server::PgServer;

#[tokio::test]
async fn pages_are_read_through_the_index_of_the_table_and_are_not_sorted() {
    let name = "pages_are_read_through_the_index_of_the_table_and_are_not_sorted";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let chat = Chat::new(&server).await;
    chat.run(
        "INSERT INTO app.person (person) VALUES ('ann'), ('bob');
         INSERT INTO app.room (room) SELECT 'r' || n FROM generate_series(1, 500) n;
         SELECT app.enter(room, 'ann') FROM app.room;
         UPDATE app.room SET last_seq = 5000 WHERE room = 'r1';
         INSERT INTO app.post (room, seq, author, body)
         SELECT 'r1', n, 'bob', 'x' FROM generate_series(1, 5000) n;
         SELECT app.send(room, 'bob', 'y'), app.change(room, 1, 'edit', 'z')
         FROM app.room, generate_series(1, 3)",
    )
    .await;
    // The planner knows nothing, then everything.
    for turn in ["fresh", "analysed"] {
        let lines = chat.export_now("ann", turn).await;
        assert_eq!(lines.iter().filter(|byte| **byte == b'\n').count(), 6500);
        for (statement, index) in [("MESSAGES", "post_pkey"), ("REVISIONS", "post_change_pkey")] {
            let plan = plan_of_a_page(&chat, statement).await;
            let nested = find(&plan, &|node| node["Node Type"] == "Nested Loop").expect("a loop");
            let text = nested.to_string();
            let sorts = text.contains("Sort") || text.contains("Seq Scan");
            assert!(!sorts && text.contains(index), "{turn}: {plan:#}");
        }
        chat.run("ANALYZE").await;
    }
}

/// How a statement that reads a page is planned, taken from where it stands.
async fn plan_of_a_page(chat: &Chat, statement: &str) -> Value {
    let source = include_str!("../../../src/source/postgres/read.rs");
    let begin = format!("const {statement}: &str = \"");
    let sql = source.split(&begin).nth(1).unwrap();
    let sql = sql.split("\";").next().unwrap();
    let prepare = format!("PREPARE page (text[], bigint[], bigint[], bigint) AS {sql}");
    chat.run(&prepare).await;
    let explain = "EXPLAIN (FORMAT JSON) EXECUTE page ('{r1}', '{2}', '{1001}', 500000)";
    let rows = chat.admin.simple_query(explain).await.unwrap();
    chat.run("DEALLOCATE page").await;
    let text = rows.iter().find_map(|row| match row {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    serde_json::from_str::<Value>(text.unwrap()).unwrap()[0]["Plan"].take()
}

fn find<'p>(plan: &'p Value, wanted: &dyn Fn(&Value) -> bool) -> Option<&'p Value> {
    if wanted(plan) {
        return Some(plan);
    }
    let below = plan["Plans"].as_array().into_iter().flatten();
    below.into_iter().find_map(|node| find(node, wanted))
}

#[tokio::test]
async fn an_open_past_begins_where_the_room_does_also_where_stays_say_their_seqs() {
    let name = "an_open_past_begins_where_the_room_does_also_where_stays_say_their_seqs";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let chat = Chat::new(&server).await;
    chat.run(
        "INSERT INTO app.person (person) VALUES ('all'), ('late');
         INSERT INTO app.room (room, last_seq, open_past) VALUES ('open', 99, true);
         SELECT app.send('open', 'all', 'old') FROM generate_series(1, 3);
         SELECT app.enter('open', 'late');
         SELECT app.send('open', 'all', 'new') FROM generate_series(1, 2);
         ALTER TABLE app.membership ADD first_seq bigint DEFAULT 103, ADD last_seq bigint;
         CREATE OR REPLACE VIEW ibid.stay AS
         SELECT room AS conv, person AS user_id, joined_gseq AS from_gseq, left_gseq AS to_gseq,
                first_seq, last_seq
         FROM app.membership",
    )
    .await;
    let lines = chat.export_now("late", "1").await;
    assert_eq!(lines.iter().filter(|byte| **byte == b'\n').count(), 5);
}

#[tokio::test]
async fn a_room_may_begin_at_any_seq_and_a_hole_in_it_is_noticed() {
    let name = "a_room_may_begin_at_any_seq_and_a_hole_in_it_is_noticed";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let chat = Chat::new(&server).await;
    chat.run(
        "INSERT INTO app.person (person) VALUES ('all'), ('early'), ('late'), ('left'), ('gone');
         INSERT INTO app.room (room, last_seq, open_past)
         VALUES ('closed', 99, false), ('empty', 0, false), ('open', 99, true);
         SELECT app.enter(room, 'early'), app.enter(room, 'gone') FROM app.room;
         SELECT app.send(room, 'all', 'old') FROM app.room, generate_series(1, 3)
         WHERE room <> 'empty';
         SELECT app.enter(room, 'late'), app.enter(room, 'left'), app.leave(room, 'left')
         FROM app.room;
         SELECT app.send(room, 'all', 'new') FROM app.room, generate_series(1, 4)
         WHERE room <> 'empty';
         SELECT app.leave(room, 'gone') FROM app.room",
    )
    .await;
    let log = |lines: Vec<u8>| -> Vec<(String, u64)> {
        let lines = String::from_utf8(lines).unwrap();
        let lines = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        let place = |line: Value| {
            let conv = line["conv"].as_str().unwrap().to_owned();
            (conv, line["seq"].as_u64().unwrap())
        };
        lines.map(place).collect()
    };
    let expected = |closed: std::ops::Range<u64>, open: std::ops::Range<u64>| {
        let closed = closed.map(|seq| ("closed".to_owned(), seq));
        let open = open.map(|seq| ("open".to_owned(), seq));
        closed.chain(open).collect::<Vec<_>>()
    };
    let early = log(chat.export_now("early", "1").await);
    assert_eq!(early, expected(100..107, 100..107));
    let late = log(chat.export_now("late", "1").await);
    assert_eq!(late, expected(103..107, 100..107));
    let left = log(chat.export_now("left", "1").await);
    assert_eq!(left, expected(0..0, 100..103));

    let gone = log(chat.export_now("gone", "1").await);
    assert_eq!(gone, early);

    // In the middle of what is read; where it is looked for; and at the end, where the room's own
    // counter tells. Some are noticed when an export is created, some when it is made.
    for seq in [104, 103, 106] {
        chat.run(&format!(
            "CREATE TABLE app.hole AS SELECT * FROM app.post WHERE (room, seq) = ('closed', {seq});
             DELETE FROM app.post WHERE (room, seq) = ('closed', {seq})"
        ))
        .await;
        for user in ["early", "gone"] {
            let key = format!("hole-{seq}");
            let why = match create(&chat.exporter, user, "all", &key).await {
                Err(error) => error.to_string(),
                Ok(_) => chat.failure(user, &format!("{key}-again")).await,
            };
            assert!(why.contains("missing"), "{user} {seq}: {why}");
        }
        chat.run("INSERT INTO app.post SELECT * FROM app.hole; DROP TABLE app.hole")
            .await;
    }
    assert_eq!(log(chat.export_now("early", "5").await), early);
}

#[tokio::test]
async fn what_an_application_says_in_other_words_is_not_guessed() {
    let name = "what_an_application_says_in_other_words_is_not_guessed";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let chat = Chat::new(&server).await;
    chat.run(PEOPLE).await;
    chat.run("SELECT app.change('r1', 1, 'delete', NULL)").await;
    chat.run(
        "CREATE OR REPLACE VIEW ibid.revision AS
         SELECT room AS conv, seq, gseq, xid, 0::bigint AS ts, change AS kind, body,
                NULL::bytea AS body_raw FROM app.post_change",
    )
    .await;
    let why = chat.failure("p0", "1").await;
    assert!(why.contains("\"delete\" is not a kind"), "{why}");
    // A word of its own, none at all, and no row.
    for (history, rooms) in [
        ("'everything'", "true"),
        ("NULL::text", "true"),
        ("'joined'", "room <> 'r1'"),
    ] {
        chat.run(&format!(
            "CREATE OR REPLACE VIEW ibid.conv AS SELECT room AS conv, {history} AS history,
             'keep' AS ex_members, last_seq FROM app.room WHERE {rooms}"
        ))
        .await;
        let error = create(&chat.exporter, "p0", "all", "2").await.unwrap_err();
        assert!(error.to_string().contains("is not the policy"), "{error}");
    }
}

#[tokio::test]
async fn nothing_is_appended_to_what_is_the_application_s_own() {
    let name = "nothing_is_appended_to_what_is_the_application_s_own";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let chat = Chat::new(&server).await;
    chat.run(PEOPLE).await;
    // A view may well take what is written to it.
    chat.run("GRANT ALL ON ALL TABLES IN SCHEMA ibid TO ibid")
        .await;
    let source = chat.exporter.source.as_ref();
    let text = format!("{}\n{}\n", join("r0", "ann"), say("r0", "x"));
    let (imported, _) = import_into(source, text.as_bytes(), false).await;
    let error = imported.unwrap_err().to_string();
    assert!(error.contains("append there"), "{error}");
    let event = Event::parse(say("r0", "x").as_bytes()).unwrap();
    let batch = Batch {
        events: vec![(1, event)],
        skip_invalid: false,
        import: None,
    };
    let appended = source.append(batch).await;
    assert!(
        matches!(&appended, Err(SourceError::Refused(why)) if why.contains("append there")),
        "{appended:?}"
    );
    let ann = UserId::parse("p1").unwrap();
    let disabled = source.set_account(&ann, false).await;
    assert!(
        matches!(&disabled, Err(SourceError::Refused(why)) if why.contains("disable or enable")),
        "{disabled:?}"
    );
    chat.run("UPDATE app.person SET active = false WHERE person = 'p1'")
        .await;
    assert!(!source.account_enabled(&ann).await.unwrap());
    // With a table of ibid for the accounts, they are ibid's.
    chat.run(
        "DROP VIEW ibid.account;
         CREATE TABLE ibid.account (user_id text COLLATE \"C\" PRIMARY KEY, enabled boolean NOT NULL);
         ALTER TABLE ibid.account OWNER TO ibid",
    )
    .await;
    assert!(source.account_enabled(&ann).await.unwrap());
    source.set_account(&ann, false).await.unwrap();
    assert!(!source.account_enabled(&ann).await.unwrap());
}
