-- The log. Every entry has a gseq from one counter; there is one writer at a time, so the order
-- of gseq is the order of commits. Rows of message and revision are only ever added.

CREATE TABLE log_counter (
    one  INTEGER PRIMARY KEY CHECK (one = 1),
    gseq INTEGER NOT NULL
) STRICT;
INSERT INTO log_counter (one, gseq) VALUES (1, 0);

CREATE TABLE conv (
    conv       TEXT PRIMARY KEY,
    last_seq   INTEGER NOT NULL DEFAULT 0,
    history    TEXT NOT NULL DEFAULT 'joined' CHECK (history IN ('joined', 'all')),
    ex_members TEXT NOT NULL DEFAULT 'keep' CHECK (ex_members IN ('keep', 'none'))
) STRICT, WITHOUT ROWID;

-- Clustered by (conv, seq): the order in which an export reads. body is TEXT, or BLOB where
-- another program wrote bytes that are not text, so this table is not STRICT.
CREATE TABLE message (
    conv    TEXT NOT NULL,
    seq     INTEGER NOT NULL,
    gseq    INTEGER NOT NULL,
    ts      INTEGER NOT NULL, -- microseconds since 1970
    user_id TEXT NOT NULL,
    body    NOT NULL,
    files   TEXT,             -- canonical JSON array
    PRIMARY KEY (conv, seq)
) WITHOUT ROWID;

CREATE TABLE revision (
    conv TEXT NOT NULL,
    seq  INTEGER NOT NULL,
    gseq INTEGER NOT NULL,
    ts   INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('edit', 'recall', 'restore')),
    body,
    PRIMARY KEY (conv, seq, gseq),
    CHECK ((kind = 'edit') = (body IS NOT NULL))
) WITHOUT ROWID;

-- first_seq and last_seq say which messages lie inside, as gseq does, so that a reader knows
-- how many there must be. last_seq is null while the user is inside.
CREATE TABLE stay (
    user_id   TEXT NOT NULL,
    conv      TEXT NOT NULL,
    from_gseq INTEGER NOT NULL,
    to_gseq   INTEGER,
    first_seq INTEGER NOT NULL,
    last_seq  INTEGER,
    PRIMARY KEY (user_id, conv, from_gseq),
    CHECK ((to_gseq IS NULL) = (last_seq IS NULL))
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX stay_open ON stay (conv, user_id) WHERE to_gseq IS NULL;

CREATE TABLE account (
    user_id TEXT PRIMARY KEY,
    enabled INTEGER NOT NULL CHECK (enabled IN (0, 1))
) STRICT, WITHOUT ROWID;

-- Ids that the application gave to events; conv and seq where the event was a message.
CREATE TABLE event_id (
    id     TEXT PRIMARY KEY,
    digest BLOB NOT NULL,
    conv   TEXT,
    seq    INTEGER
) STRICT, WITHOUT ROWID;

-- How far each file has been imported. first is 1 while the log was empty when it began: until
-- such a file is finished no export can be created.
CREATE TABLE import (
    digest   BLOB PRIMARY KEY,
    lines    INTEGER NOT NULL,
    first    INTEGER NOT NULL CHECK (first IN (0, 1)),
    finished INTEGER NOT NULL CHECK (finished IN (0, 1))
) STRICT, WITHOUT ROWID;

-- The ledger.

CREATE TABLE ledger_identity (
    one  INTEGER PRIMARY KEY CHECK (one = 1),
    uuid TEXT NOT NULL
) STRICT;
INSERT INTO ledger_identity (one, uuid) VALUES (1, lower(hex(randomblob(16))));

CREATE TABLE export (
    job_id          TEXT PRIMARY KEY,
    user_id         TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    fingerprint     BLOB NOT NULL,
    scope           TEXT NOT NULL,
    recipe          TEXT NOT NULL, -- JSON
    encoder         TEXT NOT NULL, -- of the recipe, for the claim
    snapshot        TEXT NOT NULL, -- JSON
    messages_total  INTEGER NOT NULL,
    created_at      INTEGER NOT NULL, -- times are microseconds since 1970

    state           TEXT NOT NULL
        CHECK (state IN ('queued', 'running', 'done', 'failed', 'revoked', 'expired')),
    started_at      INTEGER,
    finished_at     INTEGER,
    expires_at      INTEGER,
    attempts        INTEGER NOT NULL DEFAULT 0,
    strikes         INTEGER NOT NULL DEFAULT 0,
    due_at          INTEGER NOT NULL,

    claim           TEXT,
    lease_until     INTEGER,
    renewed_at      INTEGER,
    progressed      INTEGER NOT NULL DEFAULT 0,

    artefact_claim    TEXT,
    artefact_sha256   BLOB,
    artefact_bytes    INTEGER,
    artefact_messages INTEGER,
    artefact_parts    INTEGER,

    problem_type    TEXT,
    problem_detail  TEXT,
    waiting_type    TEXT,
    waiting_detail  TEXT,
    waiting_since   INTEGER,
    revoked_at      INTEGER,
    revoked_by      TEXT CHECK (revoked_by IN ('owner', 'admin', 'erasure')),
    revoked_reason  TEXT,
    purging         INTEGER NOT NULL DEFAULT 0,

    -- Promise 1: one user, one key, one job.
    UNIQUE (user_id, idempotency_key),
    CHECK ((state = 'running') = (claim IS NOT NULL)),
    CHECK ((claim IS NULL) = (lease_until IS NULL)),
    CHECK (state <> 'done' OR artefact_sha256 IS NOT NULL),
    CHECK (state <> 'failed' OR problem_type IS NOT NULL),
    CHECK ((state = 'revoked') = (revoked_by IS NOT NULL))
) STRICT, WITHOUT ROWID;
CREATE INDEX export_by_user ON export (user_id, created_at, job_id);
CREATE INDEX export_by_time ON export (created_at, job_id);
CREATE INDEX export_unfinished ON export (user_id, created_at, job_id)
    WHERE state IN ('queued', 'running');
CREATE INDEX export_running ON export (user_id) WHERE state = 'running';

-- What the job's user may see, as it was when the job was created.
CREATE TABLE export_stay (
    job_id    TEXT NOT NULL,
    conv      TEXT NOT NULL,
    from_gseq INTEGER NOT NULL,
    to_gseq   INTEGER,
    first_seq INTEGER NOT NULL,
    last_seq  INTEGER NOT NULL,
    PRIMARY KEY (job_id, conv, from_gseq)
) STRICT, WITHOUT ROWID;

-- Parts that are written and safe. The rows stay when the bytes have gone into the artefact.
CREATE TABLE part (
    job_id     TEXT NOT NULL,
    part       INTEGER NOT NULL,
    claim      TEXT NOT NULL,
    first_conv TEXT NOT NULL,
    first_seq  INTEGER NOT NULL,
    last_conv  TEXT NOT NULL,
    last_seq   INTEGER NOT NULL,
    messages   INTEGER NOT NULL,
    raw_bytes  INTEGER NOT NULL,
    crc32      INTEGER NOT NULL,
    bytes      INTEGER NOT NULL,
    sha256     BLOB NOT NULL,
    PRIMARY KEY (job_id, part)
) STRICT, WITHOUT ROWID;

-- Whose turn it is: the user served longest ago comes first.
CREATE TABLE served (
    user_id   TEXT PRIMARY KEY,
    served_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE token (
    sha256     BLOB PRIMARY KEY,
    token_id   TEXT NOT NULL UNIQUE,
    user_id    TEXT NOT NULL,
    role       TEXT NOT NULL CHECK (role IN ('user', 'writer', 'admin')),
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE TABLE download (
    job_id  TEXT NOT NULL,
    source  TEXT NOT NULL,
    count   INTEGER NOT NULL,
    last_at INTEGER NOT NULL,
    PRIMARY KEY (job_id, source)
) STRICT, WITHOUT ROWID;
