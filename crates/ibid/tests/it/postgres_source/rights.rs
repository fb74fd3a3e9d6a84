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
