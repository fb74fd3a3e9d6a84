//! The append functions, called as an application calls them.

use tokio_postgres::error::SqlState;

use super::{Home, failure, number, run};
use crate::events::{TS, say, with_id};
use crate::pg_server::PgServer;

#[tokio::test]
async fn an_id_means_the_same_message_whichever_way_it_came_in() {
    let Some(server) = PgServer::start("an_id_means_the_same_message") else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let client = server.connect("log").await;
    let append = |id: &str, body: &str| {
        format!("SELECT ibid.append_message('c', 'bob', '{TS}', {body}, '{id}')")
    };
    let bodies = [
        ("plain", "x", "'x'"),
        ("Ünï \"id\"", "é😀", "'é😀'"),
        ("e", "", "''"),
    ];
    for (number_of, (id, body, sql)) in bodies.into_iter().enumerate() {
        // Imported first, then appended; and the other way round.
        let (first, second) = (format!("1 {id}"), format!("2 {id}"));
        let seq = 2 * number_of as i64 + 1;
        home.import(&[with_id(&first, &say("c", body))]).await;
        assert_eq!(number(&client, &append(&first, sql)).await, seq);
        assert_eq!(number(&client, &append(&second, sql)).await, seq + 1);
        assert_eq!(
            home.import(&[with_id(&second, &say("c", body))])
                .await
                .duplicates,
            1
        );
        let (code, message) = failure(&client, &append(&first, "'other'")).await;
        assert_eq!(code, SqlState::INVALID_PARAMETER_VALUE);
        assert!(message.contains("already used"), "{message}");
    }
    // Bytes that are text are the same content, and a NUL is content too.
    assert_eq!(number(&client, &append("1 plain", "'x'::bytea")).await, 1);
    assert_eq!(
        number(&client, &append("nul", "'\\x610062'::bytea")).await,
        7
    );
    assert_eq!(
        home.import(&[with_id("nul", &say("c", "a\0b"))])
            .await
            .duplicates,
        1
    );
    // What was not appended has left no gap.
    assert_eq!(
        number(&client, "SELECT ibid.append_message('c', 'b', now(), '')").await,
        8
    );
}

#[tokio::test]
async fn what_is_invalid_is_refused_with_its_field_and_reason() {
    let Some(server) = PgServer::start("what_is_invalid_is_refused") else {
        return;
    };
    let _home = Home::new(&server, "log").await;
    let client = server.connect("log").await;
    run(
        &client,
        "SELECT ibid.append_message('c', repeat('u', 200), '9999-12-31 23:59:59.999999Z',
                    repeat('x', 4194304), 'm'),
                ibid.append_message('c', 'u', '0001-01-01 00:00Z BC', '')",
    )
    .await;
    for (call, reason) in [
        (
            "append_message('', 'u', now(), 'x')",
            "conv must not be empty",
        ),
        (
            "append_message(NULL, 'u', now(), 'x')",
            "conv must not be null",
        ),
        (
            "append_message('c', 'u' || chr(10), now(), 'x')",
            "user_id must not hold control",
        ),
        (
            "append_message('c', chr(133), now(), 'x')",
            "user_id must not hold control",
        ),
        (
            "append_message('c', repeat('ü', 101), now(), 'x')",
            "longer than 200 bytes",
        ),
        (
            "append_message('c', 'u', now(), 'x', '')",
            "id must not be empty",
        ),
        ("append_message('c', 'u', NULL, 'x')", "ts must be a time"),
        (
            "append_message('c', 'u', 'infinity', 'x')",
            "ts must be a time",
        ),
        (
            "append_message('c', 'u', '10000-01-01Z', 'x')",
            "ts must be a time",
        ),
        (
            "append_message('c', 'u', '0002-12-31 BC', 'x')",
            "ts must be a time",
        ),
        (
            "append_message('c', 'u', now(), NULL::text)",
            "body must not be null",
        ),
        (
            "append_message('c', 'u', now(), NULL::bytea)",
            "body must not be null",
        ),
        (
            "append_message('c', 'u', now(), repeat('x', 4194305))",
            "longer than 4 MiB",
        ),
        (
            "append_messages('c', '{u}', array[now()], '{x,y}')",
            "of the same length",
        ),
        (
            "append_messages('c', '{u,NULL}', array[now(),now()], '{x,y}')",
            "user_id must not be",
        ),
        (
            "append_messages('c', '{u,v}', array[now(),now()], '{x,NULL}')",
            "body must not be",
        ),
        (
            "append_messages('c', array['u',chr(133)], array[now(),now()], '{x,y}')",
            "user_id must not hold control",
        ),
        (
            "append_messages('c', array['u',repeat('ü',101)], array[now(),now()], '{x,y}')",
            "user_id must not be longer than 200 bytes",
        ),
        (
            "append_messages('c', '{u,v}', '{now,infinity}', '{x,y}')",
            "ts must be a time",
        ),
        (
            "append_messages('c', '{u,v}', '{now,NULL}', '{x,y}')",
            "ts must be a time",
        ),
        (
            "append_messages('c', '{u,v}', '{now,now}', array['x',repeat('x', 4194305)])",
            "longer than 4 MiB",
        ),
        (
            "append_messages('', '{u}', '{now}', '{x}')",
            "conv must not be empty",
        ),
        (
            "append_messages('', '{}', '{}', '{}')",
            "conv must not be empty",
        ),
        (
            "append_edit('c', 3, now(), 'x')",
            "conversation \"c\" has no message 3",
        ),
        ("append_edit('c', 0, now(), 'x')", "has no message 0"),
        ("append_edit('c', NULL, now(), 'x')", "has no message null"),
        (
            "append_edit('nowhere', 1, now(), 'x')",
            "\"nowhere\" has no message 1",
        ),
        (
            "append_edit('nobody', now(), 'x')",
            "no message has the id \"nobody\"",
        ),
        (
            "append_edit('m', now(), NULL::text)",
            "body must not be null",
        ),
        ("append_recall('nowhere', 1, now())", "has no message 1"),
        (
            "append_recalls('{c,c}', '{1,3}', now())",
            "has no message 3",
        ),
        (
            "append_recalls('{c}', '{1,2}', now())",
            "of the same length",
        ),
        ("append_restore('nobody', now())", "no message has the id"),
        ("join_conv('c', '', now())", "user_id must not be empty"),
        (
            "leave_conv(chr(1), 'u', now())",
            "conv must not hold control",
        ),
        ("set_account('', false)", "user_id must not be empty"),
        ("set_account('u', NULL)", "enabled must not be null"),
        ("set_conv('c', 'some', NULL)", "history must be"),
        ("set_conv('c', NULL, 'some')", "ex_members must be"),
        ("set_conv('c', NULL, NULL)", "must not both be null"),
        ("lock_convs('{c,\"\"}')", "conv must not be empty"),
    ] {
        let (code, message) = failure(&client, &format!("SELECT ibid.{call}")).await;
        assert_eq!(code, SqlState::INVALID_PARAMETER_VALUE, "{call}: {message}");
        assert!(message.contains(reason), "{call}: {message}");
    }
    let left = "SELECT count(*) FROM ibid.conv";
    assert_eq!(number(&client, left).await, 1);
}

#[tokio::test]
async fn what_changes_nothing_is_no_entry() {
    let Some(server) = PgServer::start("what_changes_nothing_is_no_entry") else {
        return;
    };
    let _home = Home::new(&server, "log").await;
    let client = server.connect("log").await;
    run(
        &client,
        "SELECT ibid.append_messages('c', '{a,b}', '{now,now}', '{x,y}')",
    )
    .await;
    for (call, changes) in [
        ("leave_conv('c', 'u', now())", false),
        ("join_conv('c', 'u', now())", true),
        ("join_conv('c', 'u', now())", false),
        ("leave_conv('c', 'u', now())", true),
        ("leave_conv('c', 'u', now())", false),
        ("append_restore('c', 1, now())", false),
        ("append_recall('c', 1, now())", true),
        ("append_recall('c', 1, now())", false),
        ("append_restore('c', 1, now())", true),
        ("append_restore('c', 1, now())", false),
        ("set_account('u', true)", false),
        ("set_account('u', false)", true),
        ("set_account('u', false)", false),
        ("set_account('u', true)", true),
        ("set_conv('c', 'joined', NULL)", false),
        ("set_conv('c', 'all', NULL)", true),
        ("set_conv('c', 'all', 'none')", true),
        ("set_conv('c', NULL, 'none')", false),
    ] {
        let before = number(&client, "SELECT last_value FROM ibid.log_gseq").await;
        let row = client
            .query_one(&format!("SELECT ibid.{call}"), &[])
            .await
            .unwrap();
        assert_eq!(row.get::<_, bool>(0), changes, "{call}");
        let after = number(&client, "SELECT last_value FROM ibid.log_gseq").await;
        assert!(changes || before == after, "{call}");
    }
    let recalls = "SELECT ibid.append_recalls('{c,c,c}', '{2,1,2}', now())";
    assert_eq!(number(&client, recalls).await, 2);
    assert_eq!(number(&client, recalls).await, 0);
    let none = "SELECT ibid.append_messages('c', '{}', '{}', '{}') IS NULL";
    assert!(client.query_one(none, &[]).await.unwrap().get::<_, bool>(0));
}

#[tokio::test]
async fn a_time_is_kept_to_the_microsecond_whichever_function_it_came_through() {
    let name = "a_time_is_kept_to_the_microsecond_whichever_function_it_came_through";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let _home = Home::new(&server, "log").await;
    let client = server.connect("log").await;
    // A step that is no round number of anything, over years that binary fractions of a second
    // can tell apart and years that they cannot; and both sides of where that is decided.
    run(
        &client,
        "CREATE TABLE given AS
         SELECT ts, row_number() OVER (ORDER BY ts) AS seq FROM (
             SELECT '0001-01-01 00:00Z BC'::timestamptz + n * interval '51 days 12345.678901 s'
             FROM generate_series(0, 70000) n
             UNION ALL
             SELECT edge::timestamptz + n * interval '1 microsecond'
             FROM unnest('{1930-01-01Z,1970-01-01Z,2040-01-01Z}'::text[]) edge,
                  generate_series(-500, 500) n
         ) AS times (ts);
         SELECT ibid.append_messages(
             'batch', array_agg('u'::text), array_agg(ts ORDER BY seq), array_agg('x'::text)
         ) FROM given;
         SELECT ibid.append_message('single', 'u', ts, 'x')
         FROM (SELECT ts FROM given WHERE seq % 10 = 0 ORDER BY seq) AS tenth",
    )
    .await;
    let other = "SELECT count(*) FROM given g
        JOIN ibid.message b ON b.conv = 'batch' AND b.seq = g.seq
        LEFT JOIN ibid.message s ON s.conv = 'single' AND s.seq * 10 = g.seq
        WHERE b.ts <> (extract(epoch FROM g.ts) * 1000000)::bigint
           OR s.ts IS DISTINCT FROM CASE WHEN g.seq % 10 = 0 THEN b.ts END";
    assert_eq!(number(&client, other).await, 0);
    let both = "SELECT count(*) - (SELECT count(*) + count(*) / 10 FROM given) FROM ibid.message";
    assert_eq!(number(&client, both).await, 0);
}
