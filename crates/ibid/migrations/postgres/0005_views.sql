-- What is read where an application has put its own tables behind the relations of the log, as
-- views: see docs/own-tables.md.

-- The seq of the newest message of a conversation below a gseq; of none, the one before its first
-- message. Null where a message is missing on the way, so that a log with a hole is noticed. Which
-- is the last message of the conversation is asked only where last_seq is null.
--
-- Such stays do not say which seqs lie inside. Inside a conversation gseq order is seq order and
-- seq has no gaps, so halving finds that with no other index than the one on (conv, seq).
-- It is a function, which sees what the statement that calls it sees, because a subquery of this
-- kind makes the planner think that statement so dear that it compiles it (jit).
CREATE FUNCTION ibid.last_before(of_conv text, before_gseq bigint, last_seq bigint)
RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    below bigint; -- has a smaller gseq, or is the one before the first
    above bigint; -- has a larger one, or is the one after the last
    middle bigint;
    found bigint;
BEGIN
    SELECT m.seq - 1 INTO below FROM ibid.message m WHERE m.conv = of_conv
    ORDER BY m.seq LIMIT 1;
    IF below IS NULL THEN
        RETURN 0;
    END IF;
    above := last_seq + 1;
    IF above IS NULL THEN
        SELECT m.seq + 1 INTO above FROM ibid.message m WHERE m.conv = of_conv
        ORDER BY m.seq DESC LIMIT 1;
    END IF;
    WHILE above - below > 1 LOOP
        middle := (below + above) / 2;
        SELECT m.gseq INTO found FROM ibid.message m WHERE m.conv = of_conv AND m.seq = middle;
        IF found IS NULL THEN
            RETURN NULL;
        ELSIF found < before_gseq THEN
            below := middle;
        ELSE
            above := middle;
        END IF;
    END LOOP;
    RETURN below;
END $$;
REVOKE ALL ON FUNCTION ibid.last_before(text, bigint, bigint) FROM PUBLIC;
