//! What the owner of the tables writes past the functions, as one who keeps their rules: the
//! conversation's row is updated first, and only then are seqs and gseqs drawn.

use std::io::Cursor;

use futures::SinkExt as _;
use serde_json::{Value, json};
use tokio_postgres::{Client, Error};

use super::MICROS;

/// Messages by one INSERT ... SELECT.
pub async fn insert_select(
    client: &Client,
    conv: &str,
    user: &str,
    body: &str,
    messages: u64,
) -> Result<Vec<Value>, Error> {
    let sql = format!(
        "UPDATE ibid.conv SET last_seq = last_seq + {messages} WHERE conv = '{conv}';
         INSERT INTO ibid.message (conv, seq, ts, user_id, body)
         SELECT conv, last_seq - {messages} + n, {MICROS}, '{user}', '{body}.' || n
         FROM ibid.conv, generate_series(1, {messages}) n WHERE conv = '{conv}' ORDER BY n"
    );
    client.batch_execute(&sql).await?;
    Ok(told(conv, body, messages))
}

/// Messages and an edit of the first of them by COPY.
pub async fn copy(
    client: &Client,
    conv: &str,
    user: &str,
    body: &str,
    messages: u64,
) -> Result<Vec<Value>, Error> {
    let first = draw_seqs(client, conv, messages).await? + 1;
    let mut rows = String::new();
    for (n, seq) in (1..=messages).zip(first..) {
        rows += &format!("{conv}\t{seq}\t{MICROS}\t{user}\t{body}.{n}\n");
    }
    copy_into(client, "message (conv, seq, ts, user_id, body)", rows).await?;
    let row = format!("{conv}\t{first}\t{MICROS}\tedit\t{body} by COPY\n");
    copy_into(client, "revision (conv, seq, ts, kind, body)", row).await?;
    Ok(told(conv, body, messages))
}

async fn copy_into(client: &Client, columns: &str, rows: String) -> Result<(), Error> {
    let sql = format!("COPY ibid.{columns} FROM STDIN");
    let mut sink = Box::pin(client.copy_in(&sql).await?);
    sink.send(Cursor::new(rows.into_bytes())).await?;
    sink.as_mut().finish().await.map(drop)
}

/// Numbers of entries that are not written yet.
pub struct Drawn {
    conv: String,
    seq: i64,
    message: i64,
    edit: i64,
}

impl Drawn {
    pub async fn new(client: &Client, conv: &str) -> Result<Drawn, Error> {
        let seq = draw_seqs(client, conv, 1).await? + 1;
        let sql = "SELECT nextval('ibid.log_gseq'), nextval('ibid.log_gseq')";
        let row = client.query_one(sql, &[]).await?;
        Ok(Drawn {
            conv: conv.to_owned(),
            seq,
            message: row.get(0),
            edit: row.get(1),
        })
    }

    /// Writes a message and an edit of an older one under the numbers.
    pub async fn write(self, client: &Client, user: &str, body: &str) -> Result<Vec<Value>, Error> {
        let Drawn {
            conv,
            seq,
            message,
            edit,
        } = self;
        let sql = format!(
            "INSERT INTO ibid.revision (conv, seq, gseq, ts, kind, body)
             VALUES ('{conv}', {seq} / 2, {edit}, {MICROS}, 'edit', '{body} drawn');
             INSERT INTO ibid.message (conv, seq, gseq, ts, user_id, body)
             VALUES ('{conv}', {seq}, {message}, {MICROS}, '{user}', '{body}')"
        );
        client.batch_execute(&sql).await?;
        Ok(vec![json!({"conv": conv, "body": body})])
    }
}

/// Locks the conversation and gives the seq before the ones drawn.
async fn draw_seqs(client: &Client, conv: &str, messages: u64) -> Result<i64, Error> {
    let sql = format!(
        "UPDATE ibid.conv SET last_seq = last_seq + {messages} WHERE conv = '{conv}'
         RETURNING last_seq - {messages}"
    );
    Ok(client.query_one(&sql, &[]).await?.get(0))
}

/// What is told in `done` of messages of one statement.
pub fn told(conv: &str, body: &str, messages: u64) -> Vec<Value> {
    let one = |n| json!({"conv": conv, "body": format!("{body}.{n}")});
    (1..=messages).map(one).collect()
}
