-- Uploads of artefacts that were begun in an object store: what is sent stays there, unseen, until
-- the upload is finished or given up. Written under the claim before anything is sent.

CREATE TABLE upload (
    job_id    TEXT NOT NULL,
    claim     TEXT NOT NULL,
    upload_id TEXT NOT NULL,
    PRIMARY KEY (job_id, upload_id)
) STRICT, WITHOUT ROWID;

-- For the sweep of what has expired.
CREATE INDEX export_by_expiry ON export (expires_at) WHERE state IN ('done', 'failed');

-- Whether the bytes of a job that is purging are gone.
ALTER TABLE export ADD COLUMN purged INTEGER NOT NULL DEFAULT 0;
CREATE INDEX export_to_purge ON export (job_id) WHERE purging = 1 AND purged = 0;
