//! Storing what a batch has made: a statement a table, however many rows.

use std::collections::HashSet;

use tokio_postgres::Transaction;
use tokio_postgres::types::{ToSql, Type};

use super::signed;
use crate::append::Writes;
use crate::ids::{ConvId, UserId};

/// Stores what a batch has made. `created` are the conversations that were created when they were
/// locked.
pub(super) async fn store(
    tx: &Transaction<'_>,
    writes: &Writes<'_>,
    created: &[String],
) -> Result<(), tokio_postgres::Error> {
    store_messages(tx, writes).await?;
    store_revisions(tx, writes).await?;
    store_stays(tx, writes).await?;
    if !writes.accounts.is_empty() {
        let users: Vec<&str> = writes.accounts.keys().map(UserId::as_str).collect();
        let enabled: Vec<bool> = writes.accounts.values().copied().collect();
        insert(
            tx,
            "INSERT INTO ibid.account (user_id, enabled)
             SELECT * FROM unnest($1::text[], $2::boolean[]) ORDER BY 1
             ON CONFLICT (user_id) DO UPDATE SET enabled = excluded.enabled",
            &[(&users, Type::TEXT_ARRAY), (&enabled, Type::BOOL_ARRAY)],
        )
        .await?;
    }
    store_ids(tx, writes).await?;
    store_convs(tx, writes, created).await
}

/// text cannot hold NUL; a body with one is kept as bytes.
fn split_body(body: Option<&str>) -> (Option<&str>, Option<&[u8]>) {
    match body {
        Some(body) if body.contains('\0') => (None, Some(body.as_bytes())),
        body => (body, None),
    }
}

async fn store_messages(
    tx: &Transaction<'_>,
    writes: &Writes<'_>,
) -> Result<(), tokio_postgres::Error> {
    let rows = &writes.messages;
    if rows.is_empty() {
        return Ok(());
    }
    let convs: Vec<&str> = rows.iter().map(|row| row.conv.as_str()).collect();
    let seqs: Vec<i64> = rows.iter().map(|row| signed(row.seq)).collect();
    let gseqs: Vec<i64> = rows.iter().map(|row| signed(row.gseq)).collect();
    let times: Vec<i64> = rows.iter().map(|row| row.ts.micros()).collect();
    let users: Vec<&str> = rows.iter().map(|row| row.user.as_str()).collect();
    let (texts, raws): (Vec<_>, Vec<_>) = rows.iter().map(|row| split_body(Some(row.body))).unzip();
    let files: Vec<Option<&str>> = rows.iter().map(|row| row.files.as_deref()).collect();
    insert(
        tx,
        "INSERT INTO ibid.message (conv, seq, gseq, ts, user_id, body, body_raw, files)
         SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[],
                              $6::text[], $7::bytea[], $8::text[])",
        &[
            (&convs, Type::TEXT_ARRAY),
            (&seqs, Type::INT8_ARRAY),
            (&gseqs, Type::INT8_ARRAY),
            (&times, Type::INT8_ARRAY),
            (&users, Type::TEXT_ARRAY),
            (&texts, Type::TEXT_ARRAY),
            (&raws, Type::BYTEA_ARRAY),
            (&files, Type::TEXT_ARRAY),
        ],
    )
    .await
}

async fn store_revisions(
    tx: &Transaction<'_>,
    writes: &Writes<'_>,
) -> Result<(), tokio_postgres::Error> {
    let rows = &writes.revisions;
    if rows.is_empty() {
        return Ok(());
    }
    let convs: Vec<&str> = rows.iter().map(|row| row.conv.as_str()).collect();
    let seqs: Vec<i64> = rows.iter().map(|row| signed(row.seq)).collect();
    let gseqs: Vec<i64> = rows.iter().map(|row| signed(row.gseq)).collect();
    let times: Vec<i64> = rows.iter().map(|row| row.ts.micros()).collect();
    let kinds: Vec<&str> = rows.iter().map(|row| row.kind).collect();
    let (texts, raws): (Vec<_>, Vec<_>) = rows.iter().map(|row| split_body(row.body)).unzip();
    insert(
        tx,
        "INSERT INTO ibid.revision (conv, seq, gseq, ts, kind, body, body_raw)
         SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[],
                              $6::text[], $7::bytea[])",
        &[
            (&convs, Type::TEXT_ARRAY),
            (&seqs, Type::INT8_ARRAY),
            (&gseqs, Type::INT8_ARRAY),
            (&times, Type::INT8_ARRAY),
            (&kinds, Type::TEXT_ARRAY),
            (&texts, Type::TEXT_ARRAY),
            (&raws, Type::BYTEA_ARRAY),
        ],
    )
    .await
}

async fn store_stays(
    tx: &Transaction<'_>,
    writes: &Writes<'_>,
) -> Result<(), tokio_postgres::Error> {
    let rows = &writes.ended;
    if !rows.is_empty() {
        let convs: Vec<&str> = rows.iter().map(|row| row.conv.as_str()).collect();
        let users: Vec<&str> = rows.iter().map(|row| row.user.as_str()).collect();
        let to: Vec<i64> = rows.iter().map(|row| signed(row.to_gseq)).collect();
        let last: Vec<i64> = rows.iter().map(|row| signed(row.last_seq)).collect();
        insert(
            tx,
            "UPDATE ibid.stay s SET to_gseq = e.to_gseq, last_seq = e.last_seq
             FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[])
                 AS e (conv, user_id, to_gseq, last_seq)
             WHERE s.conv = e.conv AND s.user_id = e.user_id AND s.to_gseq IS NULL",
            &[
                (&convs, Type::TEXT_ARRAY),
                (&users, Type::TEXT_ARRAY),
                (&to, Type::INT8_ARRAY),
                (&last, Type::INT8_ARRAY),
            ],
        )
        .await?;
    }
    let rows = &writes.begun;
    if rows.is_empty() {
        return Ok(());
    }
    let users: Vec<&str> = rows.iter().map(|row| row.user.as_str()).collect();
    let convs: Vec<&str> = rows.iter().map(|row| row.conv.as_str()).collect();
    let from: Vec<i64> = rows.iter().map(|row| signed(row.from_gseq)).collect();
    let first: Vec<i64> = rows.iter().map(|row| signed(row.first_seq)).collect();
    let (to, last): (Vec<_>, Vec<_>) = rows
        .iter()
        .map(|row| {
            let (to, last) = row.end.unzip();
            (to.map(signed), last.map(signed))
        })
        .unzip();
    insert(
        tx,
        "INSERT INTO ibid.stay (user_id, conv, from_gseq, to_gseq, first_seq, last_seq)
         SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[],
                              $6::bigint[])",
        &[
            (&users, Type::TEXT_ARRAY),
            (&convs, Type::TEXT_ARRAY),
            (&from, Type::INT8_ARRAY),
            (&to, Type::INT8_ARRAY),
            (&first, Type::INT8_ARRAY),
            (&last, Type::INT8_ARRAY),
        ],
    )
    .await
}

/// An id that another writer is just using is waited for, and is then a unique violation, with
/// which the batch is judged once more.
async fn store_ids(tx: &Transaction<'_>, writes: &Writes<'_>) -> Result<(), tokio_postgres::Error> {
    let rows = &writes.ids;
    if rows.is_empty() {
        return Ok(());
    }
    let ids: Vec<&str> = rows.iter().map(|(id, _)| *id).collect();
    let digests: Vec<&[u8]> = rows.iter().map(|(_, known)| &known.digest[..]).collect();
    let (convs, seqs): (Vec<_>, Vec<_>) = rows
        .iter()
        .map(|(_, known)| match &known.message {
            Some((conv, seq)) => (Some(conv.as_str()), Some(signed(*seq))),
            None => (None, None),
        })
        .unzip();
    insert(
        tx,
        "INSERT INTO ibid.event_id (id, digest, conv, seq)
         SELECT * FROM unnest($1::text[], $2::bytea[], $3::text[], $4::bigint[])
         ORDER BY 1",
        &[
            (&ids, Type::TEXT_ARRAY),
            (&digests, Type::BYTEA_ARRAY),
            (&convs, Type::TEXT_ARRAY),
            (&seqs, Type::INT8_ARRAY),
        ],
    )
    .await
}

async fn store_convs(
    tx: &Transaction<'_>,
    writes: &Writes<'_>,
    created: &[String],
) -> Result<(), tokio_postgres::Error> {
    let written: HashSet<&str> = writes.convs.keys().map(ConvId::as_str).collect();
    let unused = created.iter().map(String::as_str);
    let unused: Vec<&str> = unused.filter(|conv| !written.contains(conv)).collect();
    if !unused.is_empty() {
        // Every event of theirs was refused, so they have not begun.
        insert(
            tx,
            "DELETE FROM ibid.conv WHERE conv = ANY($1)",
            &[(&unused, Type::TEXT_ARRAY)],
        )
        .await?;
    }
    let rows = &writes.convs;
    if rows.is_empty() {
        return Ok(());
    }
    let convs: Vec<&str> = rows.keys().map(ConvId::as_str).collect();
    let last: Vec<i64> = rows.values().map(|(last, _)| signed(*last)).collect();
    let policies = || rows.values().map(|(_, policy)| policy);
    let history: Vec<&str> = policies().map(|policy| policy.history.as_str()).collect();
    let ex_members: Vec<&str> = policies()
        .map(|policy| policy.ex_members.as_str())
        .collect();
    insert(
        tx,
        "UPDATE ibid.conv c
         SET last_seq = w.last_seq, history = w.history, ex_members = w.ex_members
         FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[])
             AS w (conv, last_seq, history, ex_members)
         WHERE c.conv = w.conv",
        &[
            (&convs, Type::TEXT_ARRAY),
            (&last, Type::INT8_ARRAY),
            (&history, Type::TEXT_ARRAY),
            (&ex_members, Type::TEXT_ARRAY),
        ],
    )
    .await
}

/// Writes columns of equal length as rows.
async fn insert(
    tx: &Transaction<'_>,
    sql: &str,
    columns: &[(&(dyn ToSql + Sync), Type)],
) -> Result<(), tokio_postgres::Error> {
    tx.execute_typed(sql, columns).await.map(drop)
}
