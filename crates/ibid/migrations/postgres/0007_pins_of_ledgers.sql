-- Whose pin it is: several ledgers may read one log, and none may take away another's pins. Null where
-- a ledger elsewhere made it before this was noted.

ALTER TABLE ibid.pin ADD COLUMN ledger text COLLATE "C";

UPDATE ibid.pin SET ledger = (SELECT uuid FROM ibid.ledger_identity)
WHERE EXISTS (SELECT FROM ibid.export WHERE export.job_id = pin.job_id);
