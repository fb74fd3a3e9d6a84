//! Why a snapshot is data: eleven steps on a real server.

use super::{Home, bodies, failure, number, run};
use crate::harness::until;
use crate::pg_server::PgServer;
use ibid::verify::verify;
use tokio_postgres::error::SqlState;

#[tokio::test]
async fn the_largest_gseq_lies_and_a_held_snapshot_dies_but_a_snapshot_as_data_does_neither() {
    let Some(server) = PgServer::start("the_eleven_steps") else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let [w1, w2, reader, other] = [
        server.connect("log").await,
        server.connect("log").await,
        server.connect("log").await,
        server.connect("log").await,
    ];
    run(
        &w2,
        "SELECT ibid.join_conv('a', 'ann', now()), ibid.join_conv('b', 'ann', now());
         SELECT ibid.append_message('a', 'bob', now(), 'a1')",
    )
    .await;

    // 1. W1 writes and stays open: its entries have their gseqs and are not committed.
    run(
        &w1,
        "BEGIN; SELECT ibid.append_message('a', 'bob', now(), 'late'),
                       ibid.append_edit('a', 1, now(), 'a1, edited late')",
    )
    .await;
    // 2. W2 writes to another conversation and commits: a larger gseq, committed earlier.
    run(
        &w2,
        "SELECT ibid.append_message('b', 'bob', now(), 'early')",
    )
    .await;

    // 3. A reader takes the largest gseq that it sees for a snapshot ...
    let largest = number(&reader, "SELECT max(gseq) FROM ibid.message").await;
    let up_to = format!("SELECT count(*) FROM ibid.message WHERE gseq <= {largest}");
    assert_eq!(number(&reader, &up_to).await, 2);
    let before = home.export("ann").await;
    // 4. ... and after W1 has committed there is more in the same "snapshot": the anomaly.
    run(&w1, "COMMIT").await;
    assert_eq!(number(&reader, &up_to).await, 3);

    // 5. PostgreSQL's own way: a transaction that is held open exports what it sees.
    run(&reader, "BEGIN ISOLATION LEVEL REPEATABLE READ").await;
    let exported = reader
        .query_one("SELECT pg_export_snapshot()", &[])
        .await
        .unwrap();
    let exported: String = exported.get(0);
    let import = format!("SET TRANSACTION SNAPSHOT '{exported}'");
    let all = "SELECT count(*) FROM ibid.message";
    // 6. A second session imports it, and both see one state while others commit.
    run(
        &other,
        &format!("BEGIN ISOLATION LEVEL REPEATABLE READ; {import}"),
    )
    .await;
    run(
        &w2,
        "SELECT ibid.append_message('b', 'bob', now(), 'later')",
    )
    .await;
    assert_eq!(number(&reader, all).await, 3);
    assert_eq!(number(&other, all).await, 3);
    assert_eq!(number(&w2, all).await, 4);
    // 7. In READ COMMITTED it cannot be imported.
    run(&w1, "BEGIN ISOLATION LEVEL READ COMMITTED").await;
    let (code, message) = failure(&w1, &import).await;
    assert_eq!(code, SqlState::FEATURE_NOT_SUPPORTED);
    assert!(message.contains("must have isolation level"), "{message}");
    run(&w1, "ROLLBACK").await;
    // 8. It dies with its transaction: nobody can import it any more.
    run(&reader, "COMMIT").await;
    run(&other, "COMMIT; BEGIN ISOLATION LEVEL REPEATABLE READ").await;
    let (code, message) = failure(&other, &import).await;
    let says = ["invalid snapshot identifier", "does not exist"];
    assert!(says.iter().any(|says| message.contains(says)), "{message}");
    let known = [
        SqlState::INVALID_PARAMETER_VALUE,
        SqlState::UNDEFINED_OBJECT,
    ];
    assert!(known.contains(&code), "{code:?}");
    run(&other, "ROLLBACK").await;

    // 9. ibid's snapshot was created between 3 and 4, and no transaction is open for it: W1's
    //    entries are not in it, although their gseqs are below the largest and they are committed
    //    now.
    let after = home.export("ann").await;
    run(&w2, "SELECT ibid.append_edit('b', 1, now(), 'edited')").await;
    home.work().await;
    let first = home.file(before).await;
    assert_eq!(bodies(&home.lines(before).await), ["a1", "early"]);
    let expected = ["a1, edited late", "late", "early", "later"];
    assert_eq!(bodies(&home.lines(after).await), expected);
    // 10. The server restarts, which no open transaction survives ...
    let snapshots = "SELECT string_agg(snapshot, ' ' ORDER BY job_id) FROM ibid.export";
    let stored: String = w2.query_one(snapshots, &[]).await.unwrap().get(0);
    assert!(stored.contains("\"xip\":["), "{stored}");
    server.restart();
    let answers = async || home.exporter.ledger.find(before).await.is_ok();
    until("the connections are new", answers).await;
    // 11. ... and the same job rendered again is the same file, byte for byte.
    for (job, file) in [(before, first), (after, home.file(after).await)] {
        let (source, ledger) = (home.exporter.source.as_ref(), home.exporter.ledger.as_ref());
        let again = verify(source, ledger, &home.exporter.vault, job, &mut |_, _| {}).await;
        let again = again.unwrap();
        assert_eq!(again.artefact_equal, Some(true));
        assert_eq!(again.stored_equal, Some(true));
        assert_eq!(home.file(job).await, file);
    }
    let expected = ["a1, edited late", "late", "edited", "later"];
    assert_eq!(home.bodies("ann").await, expected);
}

#[tokio::test]
async fn what_was_prepared_at_creation_stays_out_when_it_is_committed_after_a_crash() {
    let name = "what_was_prepared_at_creation_stays_out_when_it_is_committed_after_a_crash";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let client = server.connect("log").await;
    run(
        &client,
        "SELECT ibid.join_conv('c', 'ann', now()), ibid.append_message('c', 'bob', now(), 'one'),
                ibid.append_message('d', 'bob', now(), 'unseen')",
    )
    .await;
    run(
        &client,
        "BEGIN; SELECT ibid.append_edit('c', 1, now(), 'edited'),
                       ibid.append_message('c', 'bob', now(), 'two');
         PREPARE TRANSACTION 'p'",
    )
    .await;
    // A larger gseq that is committed.
    run(
        &client,
        "SELECT ibid.append_message('d', 'bob', now(), 'unseen')",
    )
    .await;
    let before = home.export("ann").await;
    server.stop_immediate();
    server.start_again();
    let client = server.connect("log").await;
    run(&client, "COMMIT PREPARED 'p'").await;
    let answers = async || home.exporter.ledger.find(before).await.is_ok();
    until("the connections are new", answers).await;
    assert_eq!(home.bodies("ann").await, ["edited", "two"]);
    assert_eq!(bodies(&home.lines(before).await), ["one"]);
}
