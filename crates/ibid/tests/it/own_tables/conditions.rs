//! Every condition that doctor checks, broken and named.

use ibid::postgres::OwnTables;

use super::Chat;
use crate::harness::until;
use crate::pg_server::PgServer;

const MESSAGE: &str =
    "SELECT room AS conv, seq, gseq, xid, 0::bigint AS ts, author AS user_id, body,
                       NULL::bytea AS body_raw";

/// What is done, what doctor then says, and what takes it back.
struct Break {
    sql: String,
    said: &'static str,
    undo: String,
    /// Exports are wrong, and not only in danger.
    fails: bool,
}

fn breaks(original: &str) -> Vec<Break> {
    let undo_view = format!("CREATE OR REPLACE VIEW ibid.message AS {original}");
    let fails = |sql: &str, said: &'static str, undo: &str| Break {
        sql: sql.to_owned(),
        said,
        undo: undo.to_owned(),
        fails: true,
    };
    let view = |columns: &str, rest: &str, said: &'static str| {
        let sql = format!("CREATE OR REPLACE VIEW ibid.message AS {columns} {rest}");
        fails(&sql, said, &undo_view)
    };
    let mut all = vec![
        view(
            &MESSAGE.replace("xid,", "p.xmin::text::xid8 AS xid,"),
            "FROM app.post p",
            "ibid.message.xid is ((p.xmin)::text)::xid8 and not a column of app.post, and xmin \
             means something else",
        ),
        view(
            &MESSAGE.replace("gseq,", "gseq + 0 AS gseq,"),
            "FROM app.post",
            "ibid.message.gseq is (post.gseq + 0) and not a column",
        ),
        view(
            MESSAGE,
            "FROM app.post JOIN app.person ON person = author",
            "not made of the rows of one table alone",
        ),
        view(
            MESSAGE,
            "FROM app.post WHERE EXISTS (SELECT FROM app.person WHERE active AND person = author)",
            "not made of the rows of one table alone",
        ),
        view(
            MESSAGE,
            "FROM app.post WHERE author <> (SELECT max(person) FROM app.person)",
            "not made of the rows of one table alone",
        ),
        view(
            MESSAGE,
            &format!("FROM app.post UNION ALL {MESSAGE} FROM app.post"),
            "not made of the rows of one table alone",
        ),
        view(
            MESSAGE,
            "FROM app.post LIMIT 1000",
            "not made of the rows of one table alone",
        ),
        view(MESSAGE, "FROM app.post WHERE false", "not made of the rows of a table"),
        fails(
            "ALTER TABLE app.post ALTER COLUMN xid DROP NOT NULL",
            "app.post.xid may be null",
            "ALTER TABLE app.post ALTER COLUMN xid SET NOT NULL",
        ),
        fails(
            "ALTER TABLE app.post ALTER COLUMN xid DROP DEFAULT",
            "app.post.xid must be filled by pg_current_xact_id() and has no default",
            "ALTER TABLE app.post ALTER COLUMN xid SET DEFAULT pg_current_xact_id()",
        ),
        fails(
            "ALTER TABLE app.post ALTER COLUMN gseq DROP NOT NULL",
            "app.post.gseq may be null",
            "ALTER TABLE app.post ALTER COLUMN gseq SET NOT NULL",
        ),
        fails(
            "CREATE SEQUENCE app.own; ALTER TABLE app.post_change ALTER COLUMN gseq
             SET DEFAULT nextval('app.own')",
            "app.post_change.gseq must be filled by nextval('ibid.log_gseq'::regclass) and has \
             nextval('app.own'::regclass)",
            "ALTER TABLE app.post_change ALTER COLUMN gseq SET DEFAULT nextval('ibid.log_gseq');
             DROP SEQUENCE app.own",
        ),
        fails(
            "ALTER TABLE app.post DROP CONSTRAINT post_pkey CASCADE;
             CREATE INDEX only_index ON app.post (room, seq)",
            "cannot be read through a unique index on its conv and seq; CREATE UNIQUE INDEX ON \
             app.post (room, seq)",
            "DROP INDEX app.only_index; ALTER TABLE app.post ADD PRIMARY KEY (room, seq)",
        ),
        fails(
            "ALTER TABLE app.post DROP CONSTRAINT post_pkey CASCADE;
             CREATE UNIQUE INDEX in_part ON app.post (room, seq) WHERE seq > 0",
            "cannot be read through a unique index",
            "DROP INDEX app.in_part; ALTER TABLE app.post ADD PRIMARY KEY (room, seq)",
        ),
        fails(
            "ALTER TABLE app.post_change DROP CONSTRAINT post_change_pkey",
            "ibid.revision cannot be read through an index",
            "ALTER TABLE app.post_change ADD PRIMARY KEY (room, seq, gseq)",
        ),
        fails(
            "ALTER TABLE app.post ENABLE ROW LEVEL SECURITY",
            "app.post has row security",
            "ALTER TABLE app.post DISABLE ROW LEVEL SECURITY",
        ),
        fails(
            "ALTER TABLE app.post_change SET UNLOGGED",
            "app.post_change is not logged",
            "ALTER TABLE app.post_change SET LOGGED",
        ),
        fails(
            "CREATE TABLE app.old_post () INHERITS (app.post)",
            "ibid.message is not made of the rows of one table alone",
            "DROP TABLE app.old_post",
        ),
        view(
            MESSAGE,
            "FROM ONLY app.parent",
            "app.parent is partitioned or inherits",
        ),
        view(
            MESSAGE,
            "FROM app.parts",
            "app.part is partitioned or inherits",
        ),
        view(MESSAGE, "FROM app.copy", "app.copy is not an ordinary table"),
        fails(
            "DROP VIEW ibid.message; CREATE VIEW ibid.message AS SELECT room AS conv, seq::integer, gseq,
             0::bigint AS ts, author AS user_id, body, NULL::bytea AS body_raw FROM app.post",
            "ibid.message.seq is of the type integer and must be bigint",
            "DROP VIEW ibid.message",
        ),
        fails(
            "DROP VIEW ibid.account",
            "ibid.account is missing",
            "CREATE VIEW ibid.account AS SELECT person AS user_id, active AS enabled FROM app.person",
        ),
        fails(
            "ALTER VIEW ibid.stay RENAME COLUMN to_gseq TO until",
            "ibid.stay has no column to_gseq (bigint)",
            "ALTER VIEW ibid.stay RENAME COLUMN until TO to_gseq",
        ),
        fails(
            "ALTER VIEW ibid.conv RENAME TO conv_view; CREATE TABLE ibid.conv AS TABLE ibid.conv_view;
             GRANT SELECT ON ibid.conv TO ibid",
            "one log cannot be in both",
            "DROP TABLE ibid.conv; ALTER VIEW ibid.conv_view RENAME TO conv",
        ),
        fails(
            "ALTER VIEW ibid.conv RENAME TO conv_view;
             CREATE MATERIALIZED VIEW ibid.conv AS TABLE ibid.conv_view;
             GRANT SELECT ON ibid.conv TO ibid",
            "ibid.conv is neither a table of ibid nor a view",
            "DROP MATERIALIZED VIEW ibid.conv; ALTER VIEW ibid.conv_view RENAME TO conv",
        ),
        fails(
            "REVOKE SELECT ON ibid.message FROM ibid",
            "ibid.message cannot be read: permission denied",
            "GRANT SELECT ON ibid.message TO ibid",
        ),
    ];
    all.push(Break {
        sql: format!(
            "CREATE OR REPLACE VIEW ibid.message AS {MESSAGE} FROM app.post WHERE body <> ''"
        ),
        said: "ibid.message leaves out rows by (post.body <> ''::text)",
        undo: undo_view.clone(),
        fails: false,
    });
    all.push(Break {
        sql: "ALTER TABLE app.membership DROP CONSTRAINT membership_pkey".to_owned(),
        said: "reads the whole of app.membership",
        undo: "ALTER TABLE app.membership ADD PRIMARY KEY (person, room, joined_gseq)".to_owned(),
        fails: false,
    });
    all
}

async fn look(chat: &Chat) -> OwnTables {
    chat.pg.inspect().await.unwrap().own_tables.unwrap()
}

#[tokio::test]
async fn every_condition_that_is_checked_is_named_when_it_is_broken() {
    let name = "every_condition_that_is_checked_is_named_when_it_is_broken";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let chat = Chat::new(&server).await;
    chat.run(
        "CREATE TABLE app.parent (LIKE app.post INCLUDING ALL);
         CREATE TABLE app.child () INHERITS (app.parent);
         CREATE TABLE app.parts (LIKE app.post INCLUDING DEFAULTS) PARTITION BY LIST (room);
         CREATE TABLE app.part PARTITION OF app.parts DEFAULT;
         CREATE MATERIALIZED VIEW app.copy AS SELECT * FROM app.post",
    )
    .await;
    let found = look(&chat).await;
    assert_eq!(
        (&found.failures[..], &found.warnings[..]),
        (&[][..], &[][..])
    );
    assert_eq!(
        found.views,
        ["message", "revision", "stay", "conv", "account"]
    );
    let tables = [
        "app.post",
        "app.post_change",
        "app.membership",
        "app.room",
        "app.person",
    ];
    assert_eq!(found.tables, tables);

    let original = "SELECT pg_get_viewdef('ibid.message')";
    let original: String = chat.admin.query_one(original, &[]).await.unwrap().get(0);
    for Break {
        sql,
        said,
        undo,
        fails,
    } in breaks(&original)
    {
        chat.run(&sql).await;
        let found = look(&chat).await;
        let (here, there) = match fails {
            true => (&found.failures, &found.warnings),
            false => (&found.warnings, &found.failures),
        };
        assert!(
            here.iter().any(|text| text.contains(said)),
            "{sql}: {found:#?}"
        );
        assert_eq!(there[..], [""; 0], "{sql}");
        chat.run(&undo).await;
        if undo == "DROP VIEW ibid.message" {
            chat.run(&format!(
                "CREATE VIEW ibid.message AS {original}; GRANT SELECT ON ibid.message TO ibid"
            ))
            .await;
        }
        chat.run("GRANT SELECT ON ibid.account TO ibid").await;
        let found = look(&chat).await;
        assert_eq!(
            (&found.failures[..], &found.warnings[..]),
            (&[][..], &[][..]),
            "{undo}"
        );
    }

    chat.run(
        "INSERT INTO app.person (person) VALUES ('ann'); INSERT INTO app.room (room) VALUES ('r');
         SELECT app.send('r', 'ann', 'x'), app.send('r', 'ann', 'y');
         UPDATE app.post SET body = 'z'; DELETE FROM app.post WHERE seq = 2",
    )
    .await;
    // What else it has counted may be told later.
    chat.run("SELECT pg_stat_force_next_flush()").await;
    until("the changes are counted", async || {
        let warnings = look(&chat).await.warnings;
        warnings
            .iter()
            .any(|text| text.contains("3 rows of app.post were updated or deleted"))
    })
    .await;
}

#[tokio::test]
async fn a_room_may_have_any_key_if_the_index_is_on_what_the_view_says() {
    let name = "a_room_may_have_any_key_if_the_index_is_on_what_the_view_says";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let chat = Chat::new(&server).await;
    chat.run(
        "CREATE TABLE app.note (LIKE app.post INCLUDING DEFAULTS);
         ALTER TABLE app.note ALTER COLUMN room TYPE bigint USING 0;
         CREATE UNIQUE INDEX ON app.note (room, seq)",
    )
    .await;
    let columns = MESSAGE.replace("room", "room::text");
    chat.run(&format!(
        "CREATE OR REPLACE VIEW ibid.message AS {columns} FROM app.note"
    ))
    .await;
    let said = "CREATE UNIQUE INDEX ON app.note (((note.room)::text), seq)";
    let found = look(&chat).await;
    assert!(
        found.failures.iter().any(|text| text.contains(said)),
        "{found:?}"
    );
    chat.run("CREATE UNIQUE INDEX ON app.note ((room::text), seq)")
        .await;
    assert_eq!(look(&chat).await.failures, [""; 0]);
}
