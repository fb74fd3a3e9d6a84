//! A writer: transactions of any shape, one after the other, also across a crash.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error};

use super::owner::{Drawn, copy, insert_select, told};
use super::{CONVS, Stage, TS, USERS};

/// Sebastiano Vigna's splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    pub fn conv(&mut self) -> String {
        format!("c{}", 10 + self.below(CONVS))
    }

    pub fn user(&mut self) -> String {
        format!("u{}", self.below(USERS))
    }
}

/// A transaction that has written and is not ended.
struct Open(Arc<Stage>);

impl Open {
    fn new(stage: &Arc<Stage>) -> Open {
        stage.open.send_modify(|open| *open += 1);
        Open(Arc::clone(stage))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.send_modify(|open| *open -= 1);
    }
}

pub struct Writer {
    stage: Arc<Stage>,
    random: Random,
    number: u64,
    label: u64,
    pub committed: Vec<i64>,
    pub rolled_back: Vec<i64>,
    pub again: u64,
    pub lost: u64,
    /// Transactions in which a gseq was drawn before another one committed, and used afterwards.
    pub late: u64,
}

impl Writer {
    pub fn new(stage: &Arc<Stage>, number: u64, seed: u64) -> Writer {
        Writer {
            stage: Arc::clone(stage),
            random: Random(seed.wrapping_mul(number + 2)),
            number,
            label: number * 1_000_000_000,
            committed: Vec::new(),
            rolled_back: Vec::new(),
            again: 0,
            lost: 0,
            late: 0,
        }
    }

    pub async fn run(mut self) -> Writer {
        loop {
            let (client, other) = (self.stage.connect().await, self.stage.connect().await);
            self.end_what_was_prepared(&other).await;
            loop {
                if self.stage.stop.is_cancelled() {
                    return self;
                }
                let Err(error) = self.transaction(&client, &other).await else {
                    continue;
                };
                let again = [
                    SqlState::T_R_DEADLOCK_DETECTED,
                    SqlState::T_R_SERIALIZATION_FAILURE,
                ];
                match error.code() {
                    Some(code) if again.contains(code) => {
                        self.again += 1;
                        if client.batch_execute("ROLLBACK").await.is_err() {
                            break;
                        }
                    }
                    // Class 57, operator intervention: the server stops.
                    Some(code) if !code.code().starts_with("57") => panic!("{error:?}"),
                    _ => break,
                }
            }
            self.lost += 1;
        }
    }

    async fn transaction(&mut self, client: &Client, other: &Client) -> Result<(), Error> {
        self.label += 1;
        let label = self.label;
        let convs = 1 + self.random.below(3);
        let convs: Vec<String> = (0..convs).map(|_| self.random.conv()).collect();
        let begin = match self.random.below(6) {
            0 => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            _ => "BEGIN",
        };
        client.batch_execute(begin).await?;
        // One that forgets to may have to try again.
        if convs.len() > 1 && self.random.below(4) > 0 {
            let sql = format!("SELECT ibid.lock_convs('{{{}}}')", convs.join(","));
            client.batch_execute(&sql).await?;
        }
        let (mut ops, mut open) = (Vec::new(), None);
        let drawn = match self.random.below(6) {
            0 => {
                let drawn = Drawn::new(client, &convs[0]).await?;
                open = Some(Open::new(&self.stage));
                let committed = *self.stage.committed.borrow();
                Some((drawn, committed))
            }
            _ => None,
        };
        for n in 0..1 + self.random.below(5) {
            let conv = &convs[self.random.below(convs.len() as u64) as usize];
            let body = format!("{label}.{n}");
            let mut op = match self.random.below(5) {
                way @ (0 | 1) => {
                    client.batch_execute("SAVEPOINT s").await?;
                    let op = self.operate(client, conv, &body).await?;
                    let end = ["ROLLBACK TO s", "RELEASE s"][way as usize];
                    client.batch_execute(end).await?;
                    if way == 0 { Vec::new() } else { op }
                }
                _ => self.operate(client, conv, &body).await?,
            };
            ops.append(&mut op);
            open.get_or_insert_with(|| Open::new(&self.stage));
            if self.random.below(2) == 0 {
                sleep(Duration::from_millis(self.random.below(12))).await;
            }
        }
        if let Some((drawn, before)) = drawn {
            // Not for ever: the others may wait for what this transaction has locked.
            let mut committed = self.stage.committed.subscribe();
            let more = committed.wait_for(|now| *now > before);
            if let Ok(Ok(_)) = timeout(Duration::from_millis(40), more).await {
                self.late += 1;
            }
            let user = self.random.user();
            let body = format!("{label}.drawn");
            ops.append(&mut drawn.write(client, &user, &body).await?);
        }
        let ops = Value::Array(ops);
        let done = format!("INSERT INTO public.done (tx_label, ops) VALUES ({label}, '{ops}')");
        client.batch_execute(&done).await?;
        match self.random.below(10) {
            0 => {
                client.batch_execute("ROLLBACK").await?;
                self.rolled_back.push(label as i64);
                Ok(())
            }
            1 | 2 => {
                let sql = format!("PREPARE TRANSACTION 'w{}-{label}'", self.number);
                client.batch_execute(&sql).await?;
                sleep(Duration::from_millis(self.random.below(4))).await;
                self.end_prepared(other, label as i64, open).await
            }
            _ => self.commit(client, "COMMIT", label as i64, open).await,
        }
    }

    /// Writes to a conversation, and gives what is told of it in `done`.
    async fn operate(
        &mut self,
        client: &Client,
        conv: &str,
        body: &str,
    ) -> Result<Vec<Value>, Error> {
        let (user, messages) = (self.random.user(), 2 + self.random.below(4));
        match self.random.below(14) {
            12 => insert_select(client, conv, &user, body, messages).await,
            13 => copy(client, conv, &user, body, messages).await,
            way => {
                let (sql, op) = self.call(way, conv, &user, body, messages);
                client.batch_execute(&sql).await?;
                Ok(op)
            }
        }
    }

    /// A call of one of the functions.
    fn call(
        &mut self,
        way: u64,
        conv: &str,
        user: &str,
        body: &str,
        messages: u64,
    ) -> (String, Vec<Value>) {
        let any = self.random.below(1_000_000);
        let revise = |what: &str, more: &str| {
            let call = format!("{what}('{conv}', 1 + {any} % last_seq, '{TS}'{more})");
            let sql = format!("SELECT ibid.{call} FROM ibid.conv WHERE conv = '{conv}'");
            (sql, vec![json!({ "conv": conv })])
        };
        let one = || vec![json!({ "conv": conv, "body": body })];
        match way {
            0..3 => {
                let call = format!("append_message('{conv}', '{user}', '{TS}', '{body}')");
                (format!("SELECT ibid.{call}"), one())
            }
            3 => {
                // Drawn long before: another order than that of the log.
                let id = format!("{any}-{body}");
                let call = format!("append_message('{conv}', '{user}', '{TS}', '{body}', '{id}')");
                (format!("SELECT ibid.{call}"), one())
            }
            4 => {
                let sql = format!(
                    "SELECT ibid.append_messages('{conv}', array_agg('{user}'::text),
                         array_agg('{TS}'::timestamptz), array_agg('{body}.' || n ORDER BY n))
                     FROM generate_series(1, {messages}) n"
                );
                (sql, told(conv, body, messages))
            }
            5..8 => revise("append_edit", &format!(", '{body}'")),
            8 => revise("append_recall", ""),
            9 => revise("append_restore", ""),
            way => {
                let what = if way == 10 { "join_conv" } else { "leave_conv" };
                let sql = format!("SELECT ibid.{what}('{conv}', '{user}', '{TS}')");
                (sql, vec![json!({ "conv": conv })])
            }
        }
    }

    async fn commit(
        &mut self,
        client: &Client,
        sql: &str,
        label: i64,
        open: Option<Open>,
    ) -> Result<(), Error> {
        let _gate = self.stage.gate.read().await;
        client.batch_execute(sql).await?;
        drop(open);
        self.committed.push(label);
        self.stage
            .committed
            .send_modify(|committed| *committed += 1);
        Ok(())
    }

    async fn end_prepared(
        &mut self,
        client: &Client,
        label: i64,
        open: Option<Open>,
    ) -> Result<(), Error> {
        let prepared = format!("PREPARED 'w{}-{label}'", self.number);
        if self.random.below(3) == 0 {
            let sql = format!("ROLLBACK {prepared}");
            client.batch_execute(&sql).await?;
            self.rolled_back.push(label);
            return Ok(());
        }
        let sql = format!("COMMIT {prepared}");
        self.commit(client, &sql, label, open).await
    }

    /// What a crash left prepared.
    async fn end_what_was_prepared(&mut self, client: &Client) {
        let sql = "SELECT split_part(gid, '-', 2)::bigint FROM pg_prepared_xacts
                   WHERE split_part(gid, '-', 1) = $1";
        let mine = format!("w{}", self.number);
        for row in client.query(sql, &[&mine]).await.unwrap() {
            self.end_prepared(client, row.get(0), None).await.unwrap();
        }
    }
}
