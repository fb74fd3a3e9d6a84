//! Requests for exports that are under way when the server crashes. Who asked does not know what
//! has become of them.

use std::sync::Arc;

use ibid::ids::JobId;
use ibid::ledger::{CreateError, Created};
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use super::{Creator, Job, Sight, Truth, look};
use crate::harness::until;

/// Users with whom nobody else has to do.
const WAITS: &str = "u10";
const COMMITS: &str = "u11";

pub struct Unanswered {
    asked: [JoinHandle<Result<Created, CreateError>>; 2],
    /// Who holds the row that one of them waits for.
    _holder: Client,
    before: Sight,
    /// What the user saw whose request is committed already.
    committed: Truth,
}

impl Creator {
    /// Leaves two requests under way. One waits for its user's row, so the crash undoes it. The
    /// other has committed, which is safe on disk, but is not told so: it waits for a standby
    /// that does not exist. So does every writer that commits from then on.
    pub async fn ask_without_an_answer(&mut self) -> Unanswered {
        let before = look(&mut self.client, WAITS, "all", true).await;
        let holder = self.stage.connect().await;
        let hold = format!("BEGIN; INSERT INTO ibid.served (user_id) VALUES ('{WAITS}')");
        holder.batch_execute(&hold).await.unwrap();
        let row = holder.query_one("SELECT pg_backend_pid()", &[]).await;
        let holder_pid: i32 = row.unwrap().get(0);
        let waits = self.ask_apart(WAITS);
        let sql = "SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))";
        let is_so = async || {
            let waiting = self.client.query(sql, &[&holder_pid]).await;
            !waiting.unwrap().is_empty()
        };
        until("a request waits for its user's row", is_so).await;

        for sql in [
            "ALTER SYSTEM SET synchronous_standby_names = 'nobody'",
            "SELECT pg_reload_conf()",
        ] {
            self.client.batch_execute(sql).await.unwrap();
        }
        let sql = "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        let is_so = async || !self.client.query(sql, &[]).await.unwrap().is_empty();
        until("writers are not told of their commits", is_so).await;
        let first = look(&mut self.client, COMMITS, "all", true).await;
        let commits = self.ask_apart(COMMITS);
        // Only a creation writes to that table.
        let sql = "SELECT FROM pg_stat_activity JOIN pg_locks USING (pid)
                   WHERE wait_event = 'SyncRep' AND relation = 'ibid.export_stay'::regclass
                   AND mode = 'RowExclusiveLock'";
        let is_so = async || !self.client.query(sql, &[]).await.unwrap().is_empty();
        until("a request is committed and not told so", is_so).await;
        let second = look(&mut self.client, COMMITS, "all", true).await;
        let committed = self.between(COMMITS, first, &second).await;
        Unanswered {
            asked: [waits, commits],
            _holder: holder,
            before,
            committed,
        }
    }

    /// After the crash: no commit waits for a standby any more.
    pub async fn let_commits_be_answered(&self) {
        for sql in [
            "ALTER SYSTEM RESET synchronous_standby_names",
            "SELECT pg_reload_conf()",
        ] {
            self.client.batch_execute(sql).await.unwrap();
        }
    }

    /// Repeats the requests: the one that was undone makes a job now, the other has made one.
    pub async fn ask_again(&mut self, unanswered: Unanswered) {
        for asked in unanswered.asked {
            let unknown = asked.await.unwrap();
            assert!(
                matches!(unknown, Err(CreateError::Ledger(_))),
                "{unknown:?}"
            );
        }
        let made = self.home.create(WAITS, "all", WAITS).await;
        let Ok(Created::New(made)) = made else {
            panic!("it was not undone: {made:?}");
        };
        let after = look(&mut self.client, WAITS, "all", true).await;
        let truth = self.between(WAITS, unanswered.before, &after).await;
        self.keep(made.job_id, WAITS, truth).await;

        let found = self.home.create(COMMITS, "all", COMMITS).await;
        let Ok(Created::Replayed(found)) = found else {
            panic!("it was lost: {found:?}");
        };
        self.keep(found.job_id, COMMITS, unanswered.committed).await;
    }

    fn ask_apart(&self, user: &'static str) -> JoinHandle<Result<Created, CreateError>> {
        let home = Arc::clone(&self.home);
        tokio::spawn(async move { home.create(user, "all", user).await })
    }

    /// Takes the one job of a user for one to be checked.
    async fn keep(&mut self, id: JobId, user: &str, truth: Truth) {
        let sql = "SELECT job_id FROM ibid.export WHERE user_id = $1";
        let jobs = self.client.query(sql, &[&user]).await.unwrap();
        let jobs: Vec<String> = jobs.iter().map(|row| row.get(0)).collect();
        assert_eq!(jobs, [id.to_string()]);
        let again = self.home.create(user, "all", user).await;
        assert!(
            matches!(&again, Ok(Created::Replayed(export)) if export.job_id == id),
            "{again:?}"
        );
        let what = format!("the export that the crash left without an answer to {user}");
        self.jobs.push(Job { id, what, truth });
    }
}
