//! What an application's role may do, and what nobody may.

use tokio_postgres::error::SqlState;

use super::{Home, failure, number, run};
use crate::pg_server::PgServer;

#[tokio::test]
async fn a_role_that_may_append_may_do_nothing_else() {
    let Some(server) = PgServer::start("a_role_that_may_append_may_do_nothing_else") else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let owner = server.connect("log").await;
    run(
        &owner,
        "CREATE ROLE \"Chat app\" LOGIN; CREATE ROLE stranger LOGIN;
         SELECT ibid.grant_append('\"Chat app\"')",
    )
    .await;
    let chat = server.connect_as("Chat%20app", "log").await;
    let stranger = server.connect_as("stranger", "log").await;
    let calls = [
        "ibid.join_conv('c', 'ann', now())",
        "ibid.append_message('c', 'bob', now(), 'one', 'm1')",
        "ibid.append_message('c', 'bob', now(), '\\x00'::bytea)",
        "ibid.append_messages('c', '{bob}', array[now()], '{three}')",
        "ibid.append_edit('m1', now(), 'uno')",
        "ibid.append_edit('c', 1, now(), 'eins')",
        "ibid.append_recall('m1', now())",
        "ibid.append_restore('m1', now())",
        "ibid.append_recalls('{c}', '{2}', now())",
        "ibid.set_conv('c', 'all', 'keep')",
        "ibid.set_account('eve', false)",
        "ibid.lock_convs('{d,c}')",
        "ibid.leave_conv('c', 'ann', now())",
    ];
    for call in calls {
        let (code, _) = failure(&stranger, &format!("SELECT {call}")).await;
        assert_eq!(code, SqlState::INSUFFICIENT_PRIVILEGE, "{call}");
        run(&chat, &format!("SELECT {call}")).await;
    }
    for refused in [
        "INSERT INTO ibid.message (conv, seq, gseq, ts, user_id, body)
         VALUES ('c', 9, 1, 0, 'bob', 'x')",
        "INSERT INTO ibid.message (conv, seq, xid, ts, user_id, body)
         VALUES ('c', 9, '3', 0, 'bob', 'x')",
        "INSERT INTO ibid.message (conv, seq, ts, user_id, body) VALUES ('c', 9, 0, 'bob', 'x')",
        "COPY ibid.message FROM STDIN",
        "COPY ibid.message TO STDOUT",
        "UPDATE ibid.message SET body = 'x'",
        "DELETE FROM ibid.message",
        "TRUNCATE ibid.message",
        "UPDATE ibid.conv SET last_seq = 0",
        "UPDATE ibid.anchor SET baseline = 99",
        "SELECT body FROM ibid.message",
        "SELECT * FROM ibid.token",
        "SELECT nextval('ibid.log_gseq')",
        "SELECT setval('ibid.log_gseq', 1)",
        "SELECT ibid.lock_sorted('{c}', '{true}')",
        "SELECT ibid.lock_log()",
        "SELECT ibid.put_message('c', 'bob', now(), 'x', NULL, NULL)",
        "SELECT ibid.grant_append('stranger')",
        "CREATE TABLE ibid.mine ()",
    ] {
        let (code, message) = failure(&chat, refused).await;
        assert_eq!(
            code,
            SqlState::INSUFFICIENT_PRIVILEGE,
            "{refused}: {message}"
        );
    }
    // Its own things in its own temporary schema do not get in the way of the functions.
    run(
        &chat,
        "CREATE TEMPORARY TABLE conv (conv text); CREATE TEMPORARY TABLE message (conv text);
         CREATE DOMAIN pg_temp.text AS integer;
         SELECT ibid.append_message('c', 'bob', now(), 'four')",
    )
    .await;
    assert_eq!(home.bodies("ann").await, ["eins", "", "three"]);
}

#[tokio::test]
async fn the_log_is_only_ever_added_to_whoever_is_at_work() {
    let name = "the_log_is_only_ever_added_to_whoever_is_at_work";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let _home = Home::new(&server, "log").await;
    let owner = server.connect("log").await;
    run(
        &owner,
        "SELECT ibid.join_conv('c', 'ann', now()), ibid.join_conv('c', 'eve', now()),
                ibid.append_message('c', 'bob', now(), 'one'),
                ibid.append_edit('c', 1, now(), 'uno'), ibid.leave_conv('c', 'ann', now())",
    )
    .await;
    for change in [
        "UPDATE ibid.message SET body = 'x'",
        "UPDATE ibid.message SET body = 'x' WHERE false",
        "DELETE FROM ibid.message",
        "TRUNCATE ibid.message",
        "INSERT INTO ibid.message (conv, seq, ts, user_id, body) VALUES ('c', 1, 0, 'b', 'x')
         ON CONFLICT (conv, seq) DO UPDATE SET body = 'x'",
        "UPDATE ibid.revision SET body = 'x'",
        "DELETE FROM ibid.revision",
        "TRUNCATE ibid.revision",
        "DELETE FROM ibid.stay",
        "TRUNCATE ibid.stay",
        "UPDATE ibid.stay SET to_gseq = 9, last_seq = 9 WHERE user_id = 'ann'",
        "UPDATE ibid.stay SET to_gseq = NULL, last_seq = NULL WHERE user_id = 'ann'",
        "UPDATE ibid.stay SET from_gseq = 0 WHERE user_id = 'eve'",
        "UPDATE ibid.stay SET to_gseq = 9, last_seq = 9, first_seq = 0 WHERE user_id = 'eve'",
    ] {
        let (code, message) = failure(&owner, change).await;
        assert_eq!(code, SqlState::RESTRICT_VIOLATION, "{change}");
        assert!(message.contains("only ever added to"), "{message}");
    }
    assert_eq!(number(&owner, "SELECT count(*) FROM ibid.message").await, 1);
    run(&owner, "SELECT ibid.leave_conv('c', 'eve', now())").await;
}

/// Things of the caller's own that have the names and arguments of PostgreSQL's and fail when
/// they are used.
const HOSTILE: &str = "
DO $do$
DECLARE
    types oid[] := ARRAY['bool', 'int4', 'int8', 'float8', 'numeric', 'text', 'bytea', 'timestamptz',
        'text[]', 'timestamptz[]', 'anyarray', 'anyelement', 'anycompatible', 'anycompatiblearray'
    ]::regtype[]::oid[];
    body text := 'LANGUAGE plpgsql AS $f$ BEGIN RAISE ''hostile''; END $f$';
    it record;
BEGIN
    FOR it IN
        SELECT proname, pg_get_function_identity_arguments(oid) AS arguments,
               pg_get_function_result(oid) AS result
        FROM pg_proc
        WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f'
          AND proargtypes::oid[] <@ types AND prorettype = ANY (types)
    LOOP
        EXECUTE format('CREATE FUNCTION hostile.%I(%s) RETURNS %s %s',
            it.proname, it.arguments, it.result, body);
    END LOOP;
    FOR it IN
        SELECT oid, oprname, oprleft::regtype AS l, oprright::regtype AS r, oprresult::regtype AS result
        FROM pg_operator
        WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprkind = 'b'
          AND oprleft = ANY (types) AND oprright = ANY (types) AND oprresult = ANY (types)
    LOOP
        EXECUTE format('CREATE FUNCTION hostile.op_%s(%s, %s) RETURNS %s %s',
            it.oid, it.l, it.r, it.result, body);
        EXECUTE format('CREATE OPERATOR hostile.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = hostile.op_%s)',
            it.oprname, it.l, it.r, it.oid);
    END LOOP;
END $do$;
CREATE DOMAIN hostile.text AS integer;
CREATE DOMAIN hostile.int8 AS integer;
CREATE DOMAIN hostile.bytea AS integer;
CREATE DOMAIN hostile.timestamptz AS integer;
CREATE TABLE hostile.conv (conv pg_catalog.text);
CREATE TABLE hostile.message (conv pg_catalog.text);
SET search_path = hostile, pg_catalog, pg_temp;
";

#[tokio::test]
async fn nothing_in_a_callers_search_path_is_used_by_the_functions() {
    let name = "nothing_in_a_callers_search_path_is_used_by_the_functions";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let owner = server.connect("log").await;
    run(
        &owner,
        "CREATE ROLE chat LOGIN; SELECT ibid.grant_append('chat');
         CREATE SCHEMA hostile AUTHORIZATION chat",
    )
    .await;
    let chat = server.connect_as("chat", "log").await;
    run(&chat, HOSTILE).await;
    for used in [
        "SELECT 1::bigint + 1",
        "SELECT pg_catalog.now() < pg_catalog.now()",
        "SELECT octet_length('x'::pg_catalog.text)",
        "SELECT unnest(ARRAY['x'::pg_catalog.text])",
    ] {
        assert_eq!(failure(&chat, used).await.1, "hostile", "{used}");
    }
    let long = "ü".repeat(100);
    for call in [
        "join_conv('c', 'ann', '2026-01-05Z')".to_owned(),
        "append_message('c', 'bob', '2026-01-05Z', 'one')".to_owned(),
        "append_message('c', 'bob', '2026-01-05Z', 'two', 'm2')".to_owned(),
        "append_message('c', 'bob', '2026-01-05Z', 'two', 'm2')".to_owned(),
        "append_message('c', 'bob', '2026-01-05Z', '\\x33'::pg_catalog.bytea)".to_owned(),
        "append_messages('c', '{bob,eve}', '{2026-01-05Z,2026-01-05Z}', '{four,five}')".to_owned(),
        // What is not right at first sight is looked at by other functions.
        format!("append_message('c', '{long}', '1815-12-10Z', 'six')"),
        format!("append_messages('c', '{{bob,{long}}}', '{{1815-12-10Z,now}}', '{{7,8}}')"),
        "append_message('new', 'bob', '2026-01-05Z', 'x')".to_owned(),
        "append_messages('newer', '{bob}', '{2026-01-05Z}', '{x}')".to_owned(),
        "append_messages('c', '{}', '{}', '{}')".to_owned(),
        "append_edit('c', 1, '2026-01-05Z', 'uno')".to_owned(),
        "append_edit('m2', '2026-01-05Z', 'due')".to_owned(),
        "append_recall('c', 7, '2026-01-05Z')".to_owned(),
        "append_recalls('{c}', '{8}', '2026-01-05Z')".to_owned(),
        "append_restore('c', 8, '2026-01-05Z')".to_owned(),
        "set_conv('c', 'joined', 'keep')".to_owned(),
        "set_account('eve', false)".to_owned(),
        "lock_convs('{d,c}')".to_owned(),
        "leave_conv('c', 'ann', '2026-01-05Z')".to_owned(),
    ] {
        run(&chat, &format!("SELECT ibid.{call}")).await;
    }
    for call in [
        "append_message('', 'bob', '2026-01-05Z', 'x')",
        "append_message('c', '', '2026-01-05Z', 'x')",
        "append_message('c', 'bob', 'infinity', 'x')",
        "append_message('c', 'bob', '2026-01-05Z', NULL)",
        "append_message('c', 'bob', '2026-01-05Z', 'other', 'm2')",
        "append_messages('', '{bob}', '{2026-01-05Z}', '{x}')",
        "append_messages('', '{}', '{}', '{}')",
        "append_messages('c', '{bob,NULL}', '{2026-01-05Z,2026-01-05Z}', '{x,y}')",
        "append_messages('c', '{bob,\"\"}', '{2026-01-05Z,2026-01-05Z}', '{x,y}')",
        "append_messages('c', '{bob}', '{NULL}', '{x}')",
        "append_messages('c', '{bob}', '{2026-01-05Z}', '{NULL}')",
        "append_messages('c', '{bob}', '{2026-01-05Z}', '{}')",
        "append_messages('c', NULL, NULL, NULL)",
    ] {
        let (code, message) = failure(&chat, &format!("SELECT ibid.{call}")).await;
        assert_eq!(code, SqlState::INVALID_PARAMETER_VALUE, "{call}: {message}");
    }
    let bodies = ["uno", "due", "3", "four", "five", "six", "", "8"];
    assert_eq!(home.bodies("ann").await, bodies);
}
