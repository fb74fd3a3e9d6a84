-- Whose pin it is: several ledgers may read one log, and none may take away another's pins. Null where
-- a ledger elsewhere made it before this was noted.

ALTER TABLE pin ADD COLUMN ledger TEXT;

UPDATE pin SET ledger = (SELECT uuid FROM ledger_identity)
WHERE EXISTS (SELECT 1 FROM export WHERE export.job_id = pin.job_id);
