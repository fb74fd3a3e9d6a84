-- Snapshots that jobs were created from. The rows belong to the log, not to the ledger: a log that
-- went back to an older state has lost them together with its last entries. A job keeps its pin
-- until it is over: one that failed can be tried again, and one that is done if its bytes are lost.

CREATE TABLE pin (
    job_id    TEXT PRIMARY KEY,
    snapshot  TEXT NOT NULL, -- JSON
    pinned_at INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER))
) STRICT, WITHOUT ROWID;

INSERT INTO pin (job_id, snapshot)
SELECT job_id, snapshot FROM export WHERE state IN ('queued', 'running', 'done', 'failed');
