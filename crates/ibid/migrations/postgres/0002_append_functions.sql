-- The functions by which the log is written, inside an application's own transaction or by ibid.
--
-- An application gets a role that may call them and nothing else:
--
--     CREATE ROLE chat LOGIN;
--     SELECT ibid.grant_append('chat');
--
-- Such a role can neither choose a gseq, a seq or a transaction number nor change what is written.
--
-- Every function first UPDATEs the conversation's row, reads nothing of the conversation before
-- that, and has its transaction's number before it draws a gseq: so inside one conversation gseq
-- order is commit order. It is an UPDATE because under REPEATABLE READ only that fails (40001)
-- where another transaction has written to the conversation meanwhile; SELECT FOR UPDATE goes on
-- with what was before. Callers try again on 40P01, and above READ COMMITTED on 40001. A
-- transaction that writes to several conversations locks them first, all at once: lock_convs.
--
-- What is invalid is refused with the code 22023 (invalid_parameter_value). Texts are those of
-- append.rs where the same is refused there.

-- Helpers. Nobody but the owner may call them.

CREATE FUNCTION ibid.refuse(VARIADIC reason text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%', array_to_string(reason, ' ') USING ERRCODE = 'invalid_parameter_value';
END $$;

-- What is wrong with an id, or null: check_id in ids.rs. text holds no NUL. Like the other plain
-- SQL ones it is written so that it is inlined: calls are what an append costs.
CREATE FUNCTION ibid.id_fault(id text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN id IS NULL THEN 'must not be null'
        WHEN id = '' THEN 'must not be empty'
        WHEN octet_length(convert_to(id, 'UTF8')) > 200 THEN 'must not be longer than 200 bytes'
        WHEN id ~ '[\u0001-\u001f\u007f-\u009f]' THEN 'must not hold control characters'
    END
$$;

CREATE FUNCTION ibid.check_id(field text, id text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF ibid.id_fault(id) IS NOT NULL THEN
        PERFORM ibid.refuse(field, ibid.id_fault(id));
    END IF;
END $$;

-- Years that an artefact can spell (RFC 3339).
CREATE FUNCTION ibid.is_time(ts timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT ts IS NOT NULL AND ts >= '0001-01-01 00:00:00+00 BC'::timestamptz
        AND ts < '10000-01-01 00:00:00+00'::timestamptz
$$;

-- Microseconds since 1970.
CREATE FUNCTION ibid.micros(ts timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT (extract(epoch FROM ts) * 1000000)::bigint
$$;

CREATE FUNCTION ibid.check_time(ts timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT ibid.is_time(ts) THEN
        PERFORM ibid.refuse('ts must be a time within the years 0000 to 9999');
    END IF;
END $$;

CREATE FUNCTION ibid.check_body(body_bytes integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF body_bytes IS NULL THEN
        PERFORM ibid.refuse('body must not be null');
    ELSIF body_bytes > 4194304 THEN
        PERFORM ibid.refuse('body must not be longer than 4 MiB');
    END IF;
END $$;

-- The digest of a message without files: Event::digest in event.rs.
CREATE FUNCTION ibid.message_digest(of_conv text, by_user text, micros bigint, body bytea)
RETURNS bytea
LANGUAGE sql AS $$
    SELECT sha256(string_agg(int8send(octet_length(part)) || part, ''::bytea ORDER BY place))
    FROM unnest(ARRAY[
        'ibid event 1'::bytea, 'message'::bytea, convert_to(of_conv, 'UTF8'),
        convert_to(by_user, 'UTF8'), int8send(micros), body, ''::bytea
    ]) WITH ORDINALITY AS parts (part, place)
$$;

-- Locks a conversation, adds to its newest seq and gives that; a conversation that does not exist
-- begins, or if it may not, the answer is null.
CREATE FUNCTION ibid.lock_conv(wanted text, begins boolean, more bigint DEFAULT 0) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last bigint;
BEGIN
    UPDATE ibid.conv c SET last_seq = c.last_seq + more WHERE c.conv = wanted
    RETURNING c.last_seq INTO last;
    IF NOT FOUND AND begins THEN
        INSERT INTO ibid.conv AS c (conv, last_seq) VALUES (wanted, more)
        ON CONFLICT (conv) DO UPDATE SET last_seq = c.last_seq + more
        RETURNING c.last_seq INTO last;
    END IF;
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

CREATE FUNCTION ibid.sorted_convs(convs text[]) RETURNS text[]
LANGUAGE sql AS $$
    SELECT coalesce(array_agg(conv ORDER BY conv), '{}')
    FROM (SELECT DISTINCT conv COLLATE "C" AS conv FROM unnest(convs) AS given (conv)) known
$$;

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

CREATE FUNCTION ibid.put_message(
    of_conv text, by_user text, at timestamptz, body text, raw bytea, with_id text
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    number bigint;
    content bytea;
    known ibid.event_id;
BEGIN
    IF ibid.id_fault(of_conv) IS NOT NULL OR ibid.id_fault(by_user) IS NOT NULL
        OR NOT ibid.is_time(at) OR (octet_length(body) <= 4194304) IS NOT TRUE
    THEN
        PERFORM ibid.check_id('conv', of_conv), ibid.check_id('user_id', by_user),
            ibid.check_time(at), ibid.check_body(octet_length(body));
    END IF;
    UPDATE ibid.conv c SET last_seq = c.last_seq + 1 WHERE c.conv = of_conv
    RETURNING c.last_seq INTO number;
    IF NOT FOUND THEN
        number := ibid.lock_conv(of_conv, true, 1);
    END IF;
    IF with_id IS NOT NULL THEN
        PERFORM ibid.check_id('id', with_id);
        content := ibid.message_digest(
            of_conv, by_user, ibid.micros(at), coalesce(raw, convert_to(body, 'UTF8')));
        INSERT INTO ibid.event_id (id, digest, conv, seq)
        VALUES (with_id, content, of_conv, number) ON CONFLICT (id) DO NOTHING;
        IF NOT FOUND THEN
            SELECT * INTO known FROM ibid.event_id e WHERE e.id = with_id;
            IF known.digest IS DISTINCT FROM content THEN
                PERFORM ibid.refuse('id is already used by an event with other content');
            END IF;
            PERFORM ibid.lock_conv(of_conv, false, -1);
            RETURN known.seq;
        END IF;
    END IF;
    INSERT INTO ibid.message (conv, seq, ts, user_id, body, body_raw)
    VALUES (of_conv, number, ibid.micros(at), by_user,
            CASE WHEN raw IS NULL THEN body END, raw);
    RETURN number;
END $$;

CREATE FUNCTION ibid.put_revision(
    what text, of_conv text, of_seq bigint, at timestamptz, body text, raw bytea
) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    last bigint;
    latest text;
BEGIN
    PERFORM ibid.check_id('conv', of_conv), ibid.check_time(at);
    last := ibid.lock_conv(of_conv, false);
    IF of_seq BETWEEN 1 AND last IS NOT TRUE THEN
        PERFORM ibid.refuse(
            'conversation', '"' || of_conv || '"', 'has no message', coalesce(of_seq::text, 'null'));
    END IF;
    IF what <> 'edit' THEN
        SELECT kind INTO latest FROM ibid.revision r
        WHERE r.conv = of_conv AND r.seq = of_seq AND r.kind <> 'edit'
        ORDER BY r.gseq DESC LIMIT 1;
        IF coalesce(latest, 'restore') = what THEN
            RETURN false;
        END IF;
    END IF;
    INSERT INTO ibid.revision (conv, seq, ts, kind, body, body_raw)
    VALUES (of_conv, of_seq, ibid.micros(at), what, body, raw);
    RETURN true;
END $$;

-- Which message has an id never changes, so it may be read before the lock.
CREATE FUNCTION ibid.find_message(wanted text, OUT conv text, OUT seq bigint)
LANGUAGE plpgsql AS $$
DECLARE
    known ibid.event_id;
BEGIN
    PERFORM ibid.check_id('message', wanted);
    SELECT * INTO known FROM ibid.event_id e WHERE e.id = wanted;
    IF NOT FOUND THEN
        PERFORM ibid.refuse('no message has the id', '"' || wanted || '"');
    ELSIF known.seq IS NULL THEN
        PERFORM ibid.refuse('"' || wanted || '"', 'is the id of an event that is not a message');
    END IF;
    conv := known.conv;
    seq := known.seq;
END $$;

-- What an application calls. These run with the rights of the owner of the log.

-- Appends a message and gives its seq. A message with an `id` that is already there with the same
-- content is not appended again: the seq is the one that it has.
CREATE FUNCTION ibid.append_message(
    conv text, user_id text, ts timestamptz, body text, id text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN ibid.put_message(conv, user_id, ts, body, NULL, id);
END $$;

-- The same for a body that text cannot hold, because of a NUL or because it is not UTF-8.
CREATE FUNCTION ibid.append_message(
    conv text, user_id text, ts timestamptz, body bytea, id text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.check_body(octet_length(body));
    RETURN ibid.put_message(conv, user_id, ts, '', body, id);
END $$;

-- Appends messages of one conversation in the order of the arrays and gives the first one's seq;
-- the others follow it without a gap. Null if there are none.
CREATE FUNCTION ibid.append_messages(
    conv text, users text[], ts timestamptz[], bodies text[]
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    messages bigint := cardinality(users);
    before bigint;
    bad record;
BEGIN
    PERFORM ibid.check_id('conv', conv);
    IF (messages = cardinality(ts) AND messages = cardinality(bodies)) IS NOT TRUE THEN
        PERFORM ibid.refuse('users, ts and bodies must be arrays of the same length');
    END IF;
    IF messages = 0 THEN
        RETURN NULL;
    END IF;
    SELECT m.* INTO bad FROM unnest(users, ts, bodies) AS m (user_id, at, body)
    WHERE ibid.id_fault(m.user_id) IS NOT NULL OR NOT ibid.is_time(m.at)
        OR m.body IS NULL OR octet_length(m.body) > 4194304
    LIMIT 1;
    IF FOUND THEN
        PERFORM ibid.check_id('user_id', bad.user_id), ibid.check_time(bad.at),
            ibid.check_body(octet_length(bad.body));
    END IF;
    before := ibid.lock_conv(conv, true, messages) - messages;
    INSERT INTO ibid.message (conv, seq, ts, user_id, body)
    SELECT append_messages.conv, before + m.place, ibid.micros(m.at), m.user_id, m.body
    FROM unnest(users, ts, bodies) WITH ORDINALITY AS m (user_id, at, body, place);
    RETURN before + 1;
END $$;

-- Edits a message, named by its conversation and seq or by the id that it was appended with.
CREATE FUNCTION ibid.append_edit(conv text, seq bigint, ts timestamptz, body text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.check_body(octet_length(body));
    PERFORM ibid.put_revision('edit', conv, seq, ts, body, NULL);
END $$;

CREATE FUNCTION ibid.append_edit(conv text, seq bigint, ts timestamptz, body bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.check_body(octet_length(body));
    PERFORM ibid.put_revision('edit', conv, seq, ts, NULL, body);
END $$;

CREATE FUNCTION ibid.append_edit(message text, ts timestamptz, body text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.append_edit(m.conv, m.seq, ts, body) FROM ibid.find_message(message) m;
END $$;

CREATE FUNCTION ibid.append_edit(message text, ts timestamptz, body bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.append_edit(m.conv, m.seq, ts, body) FROM ibid.find_message(message) m;
END $$;

-- Recalls a message; false if it is recalled already.
CREATE FUNCTION ibid.append_recall(conv text, seq bigint, ts timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN ibid.put_revision('recall', conv, seq, ts, NULL, NULL);
END $$;

CREATE FUNCTION ibid.append_recall(message text, ts timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT ibid.append_recall(m.conv, m.seq, ts) FROM ibid.find_message(message) m);
END $$;

-- Recalls messages of any conversations and gives how many were not recalled yet. Transactions
-- that name the same messages in another order do not wait for each other in a circle.
CREATE FUNCTION ibid.append_recalls(convs text[], seqs bigint[], ts timestamptz) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    sorted text[] := ibid.sorted_convs(convs);
    changed bigint;
    bad record;
BEGIN
    PERFORM ibid.check_time(ts);
    IF (cardinality(convs) = cardinality(seqs)) IS NOT TRUE THEN
        PERFORM ibid.refuse('convs and seqs must be arrays of the same length');
    END IF;
    PERFORM ibid.check_id('conv', given) FROM unnest(sorted) AS given;
    PERFORM ibid.lock_sorted(sorted, array_fill(false, ARRAY[cardinality(sorted)]));
    SELECT m.* INTO bad FROM unnest(convs, seqs) AS m (conv, seq)
    LEFT JOIN ibid.conv c ON c.conv = m.conv
    WHERE (m.seq BETWEEN 1 AND c.last_seq) IS NOT TRUE LIMIT 1;
    IF FOUND THEN
        PERFORM ibid.put_revision('recall', bad.conv, bad.seq, ts, NULL, NULL);
    END IF;
    INSERT INTO ibid.revision (conv, seq, ts, kind)
    SELECT m.conv, m.seq, ibid.micros(append_recalls.ts), 'recall'
    FROM (SELECT DISTINCT g.conv, g.seq FROM unnest(convs, seqs) AS g (conv, seq)) m
    LEFT JOIN LATERAL (
        SELECT r.kind FROM ibid.revision r
        WHERE r.conv = m.conv AND r.seq = m.seq AND r.kind <> 'edit'
        ORDER BY r.gseq DESC LIMIT 1
    ) latest ON true
    WHERE latest.kind IS DISTINCT FROM 'recall';
    GET DIAGNOSTICS changed = ROW_COUNT;
    RETURN changed;
END $$;

-- Takes a recall back; false if the message is not recalled.
CREATE FUNCTION ibid.append_restore(conv text, seq bigint, ts timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN ibid.put_revision('restore', conv, seq, ts, NULL, NULL);
END $$;

CREATE FUNCTION ibid.append_restore(message text, ts timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT ibid.append_restore(m.conv, m.seq, ts) FROM ibid.find_message(message) m);
END $$;

-- Lets a user into a conversation; false if the user is inside.
CREATE FUNCTION ibid.join_conv(conv text, user_id text, ts timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    last bigint;
BEGIN
    PERFORM ibid.check_id('conv', conv), ibid.check_id('user_id', user_id), ibid.check_time(ts);
    last := ibid.lock_conv(conv, true);
    PERFORM FROM ibid.stay s
    WHERE s.conv = join_conv.conv AND s.user_id = join_conv.user_id AND s.to_gseq IS NULL;
    IF FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO ibid.stay (user_id, conv, from_gseq, first_seq)
    VALUES (user_id, conv, nextval('ibid.log_gseq'), last + 1);
    RETURN true;
END $$;

-- Lets a user out of a conversation; false if the user is outside.
CREATE FUNCTION ibid.leave_conv(conv text, user_id text, ts timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    last bigint;
BEGIN
    PERFORM ibid.check_id('conv', conv), ibid.check_id('user_id', user_id), ibid.check_time(ts);
    last := ibid.lock_conv(conv, true);
    UPDATE ibid.stay s SET to_gseq = nextval('ibid.log_gseq'), last_seq = last
    WHERE s.conv = leave_conv.conv AND s.user_id = leave_conv.user_id AND s.to_gseq IS NULL;
    RETURN FOUND;
END $$;

-- Enables or disables an account; false if it is so already.
CREATE FUNCTION ibid.set_account(user_id text, enabled boolean) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.check_id('user_id', user_id);
    IF enabled IS NULL THEN
        PERFORM ibid.refuse('enabled must not be null');
    ELSIF enabled THEN
        -- One that no event names is enabled.
        UPDATE ibid.account a SET enabled = true
        WHERE a.user_id = set_account.user_id AND NOT a.enabled;
    ELSE
        INSERT INTO ibid.account AS a (user_id, enabled) VALUES (user_id, false)
        ON CONFLICT ON CONSTRAINT account_pkey DO UPDATE SET enabled = false WHERE a.enabled;
    END IF;
    RETURN FOUND;
END $$;

-- Sets what members and former members of a conversation see; null leaves it as it is. False if
-- it is so already.
CREATE FUNCTION ibid.set_conv(conv text, history text, ex_members text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM ibid.check_id('conv', conv);
    IF history NOT IN ('joined', 'all') THEN
        PERFORM ibid.refuse('history must be "joined" or "all"');
    ELSIF ex_members NOT IN ('keep', 'none') THEN
        PERFORM ibid.refuse('ex_members must be "keep" or "none"');
    ELSIF history IS NULL AND ex_members IS NULL THEN
        PERFORM ibid.refuse('history and ex_members must not both be null');
    END IF;
    PERFORM ibid.lock_conv(conv, true);
    UPDATE ibid.conv c
    SET history = coalesce(set_conv.history, c.history),
        ex_members = coalesce(set_conv.ex_members, c.ex_members)
    WHERE c.conv = set_conv.conv AND (c.history, c.ex_members)
        <> (coalesce(set_conv.history, c.history), coalesce(set_conv.ex_members, c.ex_members));
    RETURN FOUND;
END $$;

-- Locks conversations until the transaction ends, in the order that every writer follows; those
-- that do not exist begin.
CREATE FUNCTION ibid.lock_convs(convs text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    sorted text[] := ibid.sorted_convs(convs);
BEGIN
    PERFORM ibid.check_id('conv', given) FROM unnest(sorted) AS given;
    PERFORM ibid.lock_sorted(sorted, array_fill(true, ARRAY[cardinality(sorted)]));
END $$;

-- Who may call them.

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA ibid FROM PUBLIC;

-- Lets a role append to the log and do nothing else with it. To be repeated after a migration
-- that adds functions.
CREATE FUNCTION ibid.grant_append(role regrole) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    callable regprocedure;
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA ibid TO %s', role);
    FOR callable IN
        SELECT oid FROM pg_proc WHERE pronamespace = 'ibid'::regnamespace AND prosecdef
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', callable, role);
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION ibid.grant_append(regrole) FROM PUBLIC;

-- The log is only ever added to, whoever is at work.

CREATE FUNCTION ibid.refuse_change() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of %.% is refused: the log is only ever added to',
        TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME
    USING ERRCODE = 'restrict_violation', HINT = 'An edit, a recall and a leave are entries of '
        'their own; append them with ibid.append_edit, ibid.append_recall, ibid.leave_conv.';
END $$;
REVOKE ALL ON FUNCTION ibid.refuse_change() FROM PUBLIC;

CREATE TRIGGER only_added_to BEFORE UPDATE OR DELETE OR TRUNCATE ON ibid.message
FOR EACH STATEMENT EXECUTE FUNCTION ibid.refuse_change();
CREATE TRIGGER only_added_to BEFORE UPDATE OR DELETE OR TRUNCATE ON ibid.revision
FOR EACH STATEMENT EXECUTE FUNCTION ibid.refuse_change();
CREATE TRIGGER only_added_to BEFORE DELETE OR TRUNCATE ON ibid.stay
FOR EACH STATEMENT EXECUTE FUNCTION ibid.refuse_change();
CREATE TRIGGER only_ended BEFORE UPDATE ON ibid.stay
FOR EACH ROW WHEN (
    OLD.to_gseq IS NOT NULL OR NEW.to_gseq IS NULL
    OR (OLD.user_id, OLD.conv, OLD.from_gseq, OLD.first_seq)
        IS DISTINCT FROM (NEW.user_id, NEW.conv, NEW.from_gseq, NEW.first_seq)
) EXECUTE FUNCTION ibid.refuse_change();
