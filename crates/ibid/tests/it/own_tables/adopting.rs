//! Adoption of a database whose log is the application's own.

use super::{Chat, PEOPLE};
use ibid::postgres::Pg;

use crate::pg_server::PgServer;

#[tokio::test(flavor = "multi_thread")]
async fn adoption_locks_the_application_s_tables_and_counts_what_is_in_them() {
    let name = "adoption_locks_the_application_s_tables_and_counts_what_is_in_them";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let chat = Chat::new(&server).await;
    chat.run(PEOPLE).await;
    // As a dump that was restored into a cluster with larger numbers of transactions looks here.
    chat.run(
        "UPDATE ibid.anchor SET system_identifier = 1;
         UPDATE app.post SET xid = (xid::text::bigint + 1000000)::text::xid8",
    )
    .await;
    let refused = chat.pg.adopt().await.unwrap_err().to_string();
    assert!(
        refused.contains("as a role that may lock them"),
        "{refused}"
    );

    let admin = Pg::connect(&server.url("chat")).await.unwrap();
    // One that holds a room, and one that has written without that.
    for write in [
        "SELECT app.send('r1', 'p0', 'in flight')",
        "INSERT INTO app.post_change (room, seq, change) VALUES ('r1', 1, 'delete')",
    ] {
        let writer = server.connect_as("chat", "chat").await;
        super::run(&writer, &format!("BEGIN; {write}")).await;
        let refused = admin.adopt().await.unwrap_err().to_string();
        assert!(
            refused.contains("somebody is writing"),
            "{write}: {refused}"
        );
        super::run(&writer, "COMMIT").await;
    }
    admin.adopt().await.unwrap();
    let baseline = "SELECT baseline = (SELECT greatest(
                        (SELECT max(gseq) FROM app.post), (SELECT max(gseq) FROM app.post_change),
                        (SELECT max(greatest(joined_gseq, left_gseq)) FROM app.membership)))
                    FROM ibid.anchor";
    let is_newest: bool = chat.admin.query_one(baseline, &[]).await.unwrap().get(0);
    assert!(is_newest);
    chat.run("SELECT app.send('r1', 'p0', 'last')").await;
    let expected = chat.log().await.export("p0", "all");
    let lines = chat.export_now("p0", "1").await;
    crate::harness::assert_same_lines("p0", &lines, &expected);
}
