-- RESPONSE_ENDED: note that a background response has a result: its record is removed just before the result is,
-- so that no reader finds the record alone.
-- ARGV: id, request id
-- Touches: warmq:gateway:response:<id>, celery-task-meta-<id>
-- Returns: 1; 0 if the record or the result has gone
allow_when_full()
local key, left = 'warmq:gateway:response:' .. ARGV[1], redis.call('PTTL', RESULT .. ARGV[2])
if left < 0 or redis.call('EXISTS', key) == 0 then return 0 end
redis.call('HSET', key, 'ended', 1)
redis.call('PEXPIRE', key, math.max(1, left - 1000))
return 1
