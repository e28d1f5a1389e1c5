-- NOTE_READER: note that a batch reads a file's content until it has ended, or no longer does.
-- ARGV: file id, batch id, 1 if it reads it, 0 if no more
-- Touches: warmq:gateway:readers:<file id>
-- Returns: 1 if that was news, else 0
unblock()
return redis.call(ARGV[3] == '1' and 'SADD' or 'SREM', 'warmq:gateway:readers:' .. ARGV[1], ARGV[2])
