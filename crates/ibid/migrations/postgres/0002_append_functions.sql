-- The functions by which the log is written, inside an application's own transaction or by ibid.
--
-- An application gets a role that may call them and nothing else:
--
--     CREATE ROLE chat LOGIN;
--     SELECT ibid.grant_append('chat');
--
-- It can then neither choose a gseq, a seq or a transaction number nor change what is written.
--
-- Every function first UPDATEs the conversation's row, reads nothing of the conversation before,
-- and has its transaction's number before it draws a gseq: so inside one conversation gseq order
-- is commit order. It is an UPDATE, because under REPEATABLE READ only that fails (40001) where
-- another transaction has written to the conversation meanwhile; SELECT FOR UPDATE would go on
-- with what was. Callers try again on 40P01, and above READ COMMITTED on 40001. A transaction that
-- writes to several conversations locks them first, with lock_convs.
--
-- What is invalid is refused with the code 22023 (invalid_parameter_value).

-- What an id must be; see check_id in ids.rs. text holds no NUL.
CREATE FUNCTION ibid.check_id(field text, id text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    reason text;
BEGIN
    reason := CASE
        WHEN id IS NULL THEN 'must not be null'
        WHEN id = '' THEN 'must not be empty'
        WHEN octet_length(convert_to(id, 'UTF8')) > 200 THEN 'must not be longer than 200 bytes'
        WHEN id ~ '[\u0001-\u001f\u007f-\u009f]' THEN 'must not hold control characters'
    END;
    IF reason IS NOT NULL THEN
        RAISE EXCEPTION '% %', field, reason USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- Microseconds since 1970. The years are those of RFC 3339, which an artefact can spell.
CREATE FUNCTION ibid.micros(ts timestamptz) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    micros bigint;
BEGIN
    IF ts IS NOT NULL AND isfinite(ts) THEN
        micros := extract(epoch FROM ts) * 1000000;
    END IF;
    IF micros IS NULL OR micros NOT BETWEEN -62167219200000000 AND 253402300799999999 THEN
        RAISE EXCEPTION 'ts must be a time within the years 0000 to 9999'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN micros;
END $$;

CREATE FUNCTION ibid.check_body(body bytea) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF body IS NULL THEN
        RAISE EXCEPTION 'body must not be null' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(body) > 4194304 THEN
        RAISE EXCEPTION 'body must not be longer than 4 MiB'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- The digest of a message without files: Event::digest in event.rs.
CREATE FUNCTION ibid.message_digest(conv text, user_id text, micros bigint, body bytea)
RETURNS bytea
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT sha256(string_agg(int8send(octet_length(part)) || part, ''::bytea ORDER BY place))
    FROM unnest(ARRAY[
        'ibid event 1'::bytea, 'message'::bytea, convert_to(conv, 'UTF8'),
        convert_to(user_id, 'UTF8'), int8send(micros), body, ''::bytea
    ]) WITH ORDINALITY AS parts (part, place)
$$;

-- Locks one conversation and gives its newest seq; creates it if `begins`, else gives null where
-- there is none.
CREATE FUNCTION ibid.lock_conv(wanted text, begins boolean) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    last bigint;
BEGIN
    UPDATE ibid.conv c SET last_seq = c.last_seq WHERE c.conv = wanted RETURNING c.last_seq INTO last;
    IF NOT FOUND AND begins THEN
        INSERT INTO ibid.conv AS c (conv) VALUES (wanted)
        ON CONFLICT (conv) DO UPDATE SET last_seq = c.last_seq RETURNING c.last_seq INTO last;
    END IF;
    PERFORM pg_current_xact_id();
    RETURN last;
END $$;

-- Locks conversations in the order in which they are given, which must be bytewise, creates those
-- that may begin, and gives the ones created.
CREATE FUNCTION ibid.lock_sorted(convs text[], begins boolean[]) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    created text[] := '{}';
BEGIN
    FOR place IN 1 .. cardinality(convs) LOOP
        UPDATE ibid.conv c SET last_seq = c.last_seq WHERE c.conv = convs[place];
        IF NOT FOUND AND begins[place] THEN
            INSERT INTO ibid.conv (conv) VALUES (convs[place]) ON CONFLICT (conv) DO NOTHING;
            IF FOUND THEN
                created := created || convs[place];
            ELSE
                UPDATE ibid.conv c SET last_seq = c.last_seq WHERE c.conv = convs[place];
            END IF;
        END IF;
    END LOOP;
    RETURN created;
END $$;

-- Keeps everybody from writing to the log until the transaction ends, and waits for those who
-- are; false if one of them goes on for too long.
CREATE FUNCTION ibid.lock_log() RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    -- Whoever writes to the log updates a row of conv first.
    LOCK TABLE ibid.conv IN SHARE ROW EXCLUSIVE MODE;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;
