-- The same tables as SQLite's migration of this number, for many writers.
--
-- Every entry of the log has a gseq from one sequence and the xid of the transaction that wrote
-- it. A smaller gseq may commit later than a larger one, so what is in a snapshot is judged by
-- both (see Snapshot in snapshot.rs). Ids are ordered bytewise: COLLATE "C".

CREATE SEQUENCE ibid.log_gseq AS bigint;

CREATE TABLE ibid.conv (
    conv       text COLLATE "C" PRIMARY KEY,
    last_seq   bigint NOT NULL DEFAULT 0,
    history    text NOT NULL DEFAULT 'joined' CHECK (history IN ('joined', 'all')),
    ex_members text NOT NULL DEFAULT 'keep' CHECK (ex_members IN ('keep', 'none'))
) WITH (fillfactor = 50);

-- text cannot hold NUL, so a body with one lies in body_raw; exactly one of the two is there.
CREATE TABLE ibid.message (
    conv     text COLLATE "C" NOT NULL,
    seq      bigint NOT NULL,
    gseq     bigint NOT NULL DEFAULT nextval('ibid.log_gseq'),
    xid      xid8 NOT NULL DEFAULT pg_current_xact_id(),
    ts       bigint NOT NULL, -- microseconds since 1970
    user_id  text COLLATE "C" NOT NULL,
    body     text,
    body_raw bytea,
    files    text,            -- canonical JSON array
    PRIMARY KEY (conv, seq),
    CHECK ((body IS NULL) <> (body_raw IS NULL))
);

CREATE TABLE ibid.revision (
    conv     text COLLATE "C" NOT NULL,
    seq      bigint NOT NULL,
    gseq     bigint NOT NULL DEFAULT nextval('ibid.log_gseq'),
    xid      xid8 NOT NULL DEFAULT pg_current_xact_id(),
    ts       bigint NOT NULL,
    kind     text NOT NULL CHECK (kind IN ('edit', 'recall', 'restore')),
    body     text,
    body_raw bytea,
    PRIMARY KEY (conv, seq, gseq),
    CHECK ((kind = 'edit') = ((body IS NULL) <> (body_raw IS NULL))),
    CHECK (kind = 'edit' OR (body IS NULL AND body_raw IS NULL))
);

-- first_seq and last_seq say which messages lie inside, as gseq does, so that a reader knows
-- how many there must be. last_seq is null while the user is inside.
CREATE TABLE ibid.stay (
    user_id   text COLLATE "C" NOT NULL,
    conv      text COLLATE "C" NOT NULL,
    from_gseq bigint NOT NULL,
    to_gseq   bigint,
    first_seq bigint NOT NULL,
    last_seq  bigint,
    PRIMARY KEY (user_id, conv, from_gseq),
    CHECK ((to_gseq IS NULL) = (last_seq IS NULL))
);
CREATE UNIQUE INDEX stay_open ON ibid.stay (conv, user_id) WHERE to_gseq IS NULL;

CREATE TABLE ibid.account (
    user_id text COLLATE "C" PRIMARY KEY,
    enabled boolean NOT NULL
);

-- Ids that the application gave to events; conv and seq where the event was a message.
CREATE TABLE ibid.event_id (
    id     text COLLATE "C" PRIMARY KEY,
    digest bytea NOT NULL,
    conv   text COLLATE "C",
    seq    bigint
);

-- How far each file has been imported; see the table of SQLite.
CREATE TABLE ibid.import (
    digest   bytea PRIMARY KEY,
    lines    bigint NOT NULL,
    first    boolean NOT NULL,
    finished boolean NOT NULL
);

-- Where the log's history begins to be comparable: the cluster and database it was written in
-- (a restored dump or a logical copy is another), and the gseq below which every entry counts
-- as committed, because a first load or an adoption ended there.
CREATE TABLE ibid.anchor (
    one               boolean PRIMARY KEY CHECK (one),
    system_identifier bigint NOT NULL,
    database_oid      oid NOT NULL,
    baseline          bigint NOT NULL DEFAULT 0
);
INSERT INTO ibid.anchor (one, system_identifier, database_oid)
SELECT true, s.system_identifier, d.oid
FROM pg_control_system() s, pg_database d
WHERE d.datname = current_database();

-- The ledger.

CREATE TABLE ibid.ledger_identity (
    one  boolean PRIMARY KEY CHECK (one),
    uuid text NOT NULL
);
INSERT INTO ibid.ledger_identity (one, uuid) VALUES (true, replace(gen_random_uuid()::text, '-', ''));

CREATE TABLE ibid.export (
    job_id          text COLLATE "C" PRIMARY KEY,
    user_id         text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    fingerprint     bytea NOT NULL,
    scope           text NOT NULL,
    recipe          text NOT NULL, -- JSON
    encoder         text COLLATE "C" NOT NULL, -- of the recipe, for the claim
    snapshot        text NOT NULL, -- JSON
    messages_total  bigint NOT NULL,
    created_at      bigint NOT NULL, -- times are microseconds since 1970

    state           text NOT NULL
        CHECK (state IN ('queued', 'running', 'done', 'failed', 'revoked', 'expired')),
    started_at      bigint,
    finished_at     bigint,
    expires_at      bigint,
    attempts        integer NOT NULL DEFAULT 0,
    strikes         integer NOT NULL DEFAULT 0,
    due_at          bigint NOT NULL,

    claim           text COLLATE "C",
    lease_until     bigint,
    renewed_at      bigint,
    progressed      boolean NOT NULL DEFAULT false,

    artefact_claim    text COLLATE "C",
    artefact_sha256   bytea,
    artefact_bytes    bigint,
    artefact_messages bigint,
    artefact_parts    bigint,

    problem_type    text,
    problem_detail  text,
    waiting_type    text,
    waiting_detail  text,
    waiting_since   bigint,
    revoked_at      bigint,
    revoked_by      text CHECK (revoked_by IN ('owner', 'admin', 'erasure')),
    revoked_reason  text,
    purging         boolean NOT NULL DEFAULT false,

    -- Promise 1: one user, one key, one job.
    UNIQUE (user_id, idempotency_key),
    CHECK ((state = 'running') = (claim IS NOT NULL)),
    CHECK ((claim IS NULL) = (lease_until IS NULL)),
    CHECK (state <> 'done' OR artefact_sha256 IS NOT NULL),
    CHECK (state <> 'failed' OR problem_type IS NOT NULL),
    CHECK ((state = 'revoked') = (revoked_by IS NOT NULL))
) WITH (fillfactor = 80);
CREATE INDEX export_by_user ON ibid.export (user_id, created_at, job_id);
CREATE INDEX export_by_time ON ibid.export (created_at, job_id);
CREATE INDEX export_unfinished ON ibid.export (user_id, created_at, job_id)
    WHERE state IN ('queued', 'running');
CREATE INDEX export_running ON ibid.export (user_id) WHERE state = 'running';

-- What the job's user may see, as it was when the job was created.
CREATE TABLE ibid.export_stay (
    job_id    text COLLATE "C" NOT NULL,
    conv      text COLLATE "C" NOT NULL,
    from_gseq bigint NOT NULL,
    to_gseq   bigint,
    first_seq bigint NOT NULL,
    last_seq  bigint NOT NULL,
    PRIMARY KEY (job_id, conv, from_gseq)
);

-- Parts that are written and safe. The rows stay when the bytes have gone into the artefact.
CREATE TABLE ibid.part (
    job_id     text COLLATE "C" NOT NULL,
    part       bigint NOT NULL,
    claim      text COLLATE "C" NOT NULL,
    first_conv text COLLATE "C" NOT NULL,
    first_seq  bigint NOT NULL,
    last_conv  text COLLATE "C" NOT NULL,
    last_seq   bigint NOT NULL,
    messages   bigint NOT NULL,
    raw_bytes  bigint NOT NULL,
    crc32      bigint NOT NULL,
    bytes      bigint NOT NULL,
    sha256     bytea NOT NULL,
    PRIMARY KEY (job_id, part)
);

-- The row that creations and claims of one user are serialised by, and whose turn it is: the
-- user served longest ago comes first.
CREATE TABLE ibid.served (
    user_id   text COLLATE "C" PRIMARY KEY,
    served_at bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

CREATE TABLE ibid.token (
    sha256     bytea PRIMARY KEY,
    token_id   text NOT NULL UNIQUE,
    user_id    text COLLATE "C" NOT NULL,
    role       text NOT NULL CHECK (role IN ('user', 'writer', 'admin')),
    created_at bigint NOT NULL,
    expires_at bigint,
    revoked_at bigint
);

CREATE TABLE ibid.download (
    job_id  text COLLATE "C" NOT NULL,
    source  text COLLATE "C" NOT NULL,
    count   bigint NOT NULL,
    last_at bigint NOT NULL,
    PRIMARY KEY (job_id, source)
);
