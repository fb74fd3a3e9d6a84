-- Uploads of artefacts that were begun in an object store: what is sent stays there, unseen, until
-- the upload is finished or given up. Written under the claim before anything is sent.

CREATE TABLE ibid.upload (
    job_id    text COLLATE "C" NOT NULL,
    claim     text COLLATE "C" NOT NULL,
    upload_id text COLLATE "C" NOT NULL,
    PRIMARY KEY (job_id, upload_id)
);

-- For the sweep of what has expired.
CREATE INDEX export_by_expiry ON ibid.export (expires_at) WHERE state IN ('done', 'failed');

-- Whether the bytes of a job that is purging are gone.
ALTER TABLE ibid.export ADD COLUMN purged boolean NOT NULL DEFAULT false;
CREATE INDEX export_to_purge ON ibid.export (job_id) WHERE purging AND NOT purged;
