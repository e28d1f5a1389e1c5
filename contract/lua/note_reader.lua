-- NOTE_READER: note that a batch reads a file's content, or that it no longer does. The content is not removed
-- while a batch reads it.
-- ARGV: file id, batch id, 1 if the batch reads the content, else 0
-- Touches: warmq:gateway:readers:<file id>
-- Returns: 1 if this call has changed that, else 0
allow_when_full()
return redis.call(ARGV[3] == '1' and 'SADD' or 'SREM', 'warmq:gateway:readers:' .. ARGV[1], ARGV[2])
