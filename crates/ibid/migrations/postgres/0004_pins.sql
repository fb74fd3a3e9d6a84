-- Snapshots that jobs were created from. The rows belong to the log, not to the ledger: a log that
-- went back to an older state has lost them together with its last entries. A job keeps its pin
-- until it is over: one that failed can be tried again, and one that is done if its bytes are lost.

CREATE TABLE ibid.pin (
    job_id    text COLLATE "C" PRIMARY KEY,
    snapshot  text NOT NULL, -- JSON
    pinned_at bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
);

INSERT INTO ibid.pin (job_id, snapshot)
SELECT job_id, snapshot FROM ibid.export WHERE state IN ('queued', 'running', 'done', 'failed');
