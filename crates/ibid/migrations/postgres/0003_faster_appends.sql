-- The same append functions at a fraction of their cost. What an append does is unchanged: it
-- UPDATEs the conversation's row first, reads nothing before that, and draws its gseq after.
--
-- What an append costs is the start of statements and of functions, so append_message is two
-- statements and nothing else, and append_messages too:
--
-- * No `SET search_path`, which costs as much as a statement. Instead nothing in them is looked up
--   by the caller's search path: operators are written OPERATOR(pg_catalog.+), functions and tables
--   have their schema, and types are those that are keywords. Helpers are SQL functions with
--   RETURN, bound when they are created, and the planner puts them in place of their calls.
--   Whatever is rarely needed lies in functions that set their own search path.
-- * Arguments are judged within the INSERT: what is right at first sight, as nearly all is, goes
--   through, and only the rest is looked at by a function, which refuses it or lets it pass. The
--   conversation's id is judged when the conversation begins.
-- * The rules of conv are those of its columns' types: a CHECK of a table is read anew from its
--   text by every statement, even one that changes only last_seq; one of a type is not.

CREATE DOMAIN ibid.history AS text CHECK (VALUE IN ('joined', 'all'));
CREATE DOMAIN ibid.ex_members AS text CHECK (VALUE IN ('keep', 'none'));
ALTER TABLE ibid.conv
    DROP CONSTRAINT conv_history_check,
    DROP CONSTRAINT conv_ex_members_check,
    ALTER COLUMN history TYPE ibid.history,
    ALTER COLUMN ex_members TYPE ibid.ex_members;

-- Helpers. Nobody but the owner may call them.

-- Years that an artefact can spell (RFC 3339).
CREATE OR REPLACE FUNCTION ibid.is_time(ts timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN ts IS NOT NULL AND ts >= '0001-01-01 00:00:00+00 BC'::timestamptz
    AND ts < '10000-01-01 00:00:00+00'::timestamptz;

-- Microseconds since 1970. STABLE because extract is: as IMMUTABLE it would not be put in place
-- of its calls.
CREATE OR REPLACE FUNCTION ibid.micros(ts timestamptz) RETURNS bigint
LANGUAGE sql STABLE
RETURN (extract(epoch FROM ts) * 1000000)::bigint;

-- The digest of a message without files: Event::digest in event.rs.
CREATE OR REPLACE FUNCTION ibid.message_digest(
    of_conv text, by_user text, micros bigint, body bytea
) RETURNS bytea
LANGUAGE sql
RETURN sha256(
    int8send(12) || 'ibid event 1'::bytea || int8send(7) || 'message'::bytea
    || int8send(octet_length(convert_to(of_conv, 'UTF8'))) || convert_to(of_conv, 'UTF8')
    || int8send(octet_length(convert_to(by_user, 'UTF8'))) || convert_to(by_user, 'UTF8')
    || int8send(8) || int8send(micros) || int8send(octet_length(body)) || body || int8send(0)
);

CREATE FUNCTION ibid.judged_micros(ts timestamptz) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.check_time(ts);
    RETURN ibid.micros(ts);
END $$;

CREATE FUNCTION ibid.judged_id(field text, id text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.check_id(field, id);
    RETURN id;
END $$;

CREATE FUNCTION ibid.judged_body(body text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.check_body(octet_length(body));
    RETURN body;
END $$;

-- The three arguments of a message, judged.

-- Binary fractions are as good as decimal ones here: two roundings shift less than 2^51
-- microseconds, which are 71 years, by less than a half.
CREATE FUNCTION ibid.given_ts(ts timestamptz) RETURNS bigint
LANGUAGE sql
RETURN CASE
    WHEN ts >= '1930-01-01 00:00:00+00'::timestamptz AND ts < '2040-01-01 00:00:00+00'::timestamptz
    THEN (date_part('epoch', ts) * 1000000)::bigint
    ELSE ibid.judged_micros(ts)
END;

-- 66 bytes are at most 198 in UTF-8, whatever the encoding of the database.
CREATE FUNCTION ibid.given_user(user_id text) RETURNS text
LANGUAGE sql
RETURN CASE
    WHEN octet_length(user_id) <= 66 AND user_id ~ E'^[^\\u0001-\\u001f\\u007f-\\u009f]+$'
    THEN user_id
    ELSE ibid.judged_id('user_id', user_id)
END;

-- Whether none of the ids is null, empty or has a control character: not true if one is, or has.
-- One look at all costs what a look at a few of them does.
CREATE FUNCTION ibid.are_plain(ids text[]) RETURNS boolean
LANGUAGE sql STABLE
RETURN '' <> ALL (ids)
    AND array_to_string(ids, '') !~ E'[\\u0001-\\u001f\\u007f-\\u009f]';

CREATE FUNCTION ibid.given_body(body text) RETURNS text
LANGUAGE sql
RETURN CASE WHEN octet_length(body) <= 4194304 THEN body ELSE ibid.judged_body(body) END;

-- Begins a conversation with so many messages and gives its newest seq. Somebody else may have
-- begun it meanwhile.
CREATE FUNCTION ibid.begin_conv(wanted text, messages bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.check_id('conv', wanted);
    RETURN ibid.lock_conv(wanted, true, messages);
END $$;

-- These two are called by functions that do not set a search path.
ALTER FUNCTION ibid.refuse(text[]) SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION ibid.put_message(text, text, timestamptz, text, bytea, text)
SET search_path = pg_catalog, pg_temp;

-- What an application calls.

CREATE OR REPLACE FUNCTION ibid.append_message(
    conv text, user_id text, ts timestamptz, body text, id text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    number bigint;
BEGIN
    IF id IS NOT NULL THEN
        RETURN ibid.put_message(conv, user_id, ts, body, NULL, id);
    END IF;
    UPDATE ibid.conv AS c SET last_seq = c.last_seq OPERATOR(pg_catalog.+) 1
    WHERE c.conv OPERATOR(pg_catalog.=) append_message.conv
    RETURNING c.last_seq INTO number;
    IF NOT FOUND THEN
        number := ibid.begin_conv(conv, 1);
    END IF;
    INSERT INTO ibid.message (conv, seq, ts, user_id, body)
    VALUES (conv, number, ibid.given_ts(ts), ibid.given_user(user_id), ibid.given_body(body));
    RETURN number;
END $$;

CREATE OR REPLACE FUNCTION ibid.append_messages(
    conv text, users text[], ts timestamptz[], bodies text[]
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    messages bigint := pg_catalog.cardinality(users);
    plain boolean;
    before bigint;
BEGIN
    IF (messages OPERATOR(pg_catalog.=) pg_catalog.cardinality(ts)
        AND messages OPERATOR(pg_catalog.=) pg_catalog.cardinality(bodies)) IS NOT TRUE
    THEN
        PERFORM ibid.judged_id('conv', conv),
            ibid.refuse('users, ts and bodies must be arrays of the same length');
    ELSIF messages OPERATOR(pg_catalog.=) 0 THEN
        PERFORM ibid.judged_id('conv', conv);
        RETURN NULL;
    END IF;
    UPDATE ibid.conv AS c SET last_seq = c.last_seq OPERATOR(pg_catalog.+) messages
    WHERE c.conv OPERATOR(pg_catalog.=) append_messages.conv
    RETURNING c.last_seq OPERATOR(pg_catalog.-) messages INTO before;
    IF NOT FOUND THEN
        before := ibid.begin_conv(conv, messages) OPERATOR(pg_catalog.-) messages;
    END IF;
    plain := ibid.are_plain(users);
    INSERT INTO ibid.message (conv, seq, ts, user_id, body)
    SELECT append_messages.conv, before OPERATOR(pg_catalog.+) m.place, ibid.given_ts(m.at),
        CASE
            WHEN plain AND pg_catalog.octet_length(m.user_id) OPERATOR(pg_catalog.<=) 66
            THEN m.user_id
            ELSE ibid.judged_id('user_id', m.user_id)
        END,
        ibid.given_body(m.body)
    FROM ROWS FROM (pg_catalog.unnest(users), pg_catalog.unnest(ts), pg_catalog.unnest(bodies))
        WITH ORDINALITY AS m (user_id, at, body, place);
    RETURN before OPERATOR(pg_catalog.+) 1;
END $$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA ibid FROM PUBLIC;
