-- RESPONSE_CANCEL: cancel a background response, unless it has ended. Its record is kept as long as a result.
-- ARGV: id, owner, request id, ms for which the record is kept, s for which POP ends the request if it waits
-- Touches: warmq:gateway:response:<id>, celery-task-meta-<id>, warmq:revoked, channel warmq:cancel
-- Returns: 1; 0 if it has ended or was cancelled before; -1 if the owner has no such response
allow_when_full()
local key, request = 'warmq:gateway:response:' .. ARGV[1], ARGV[3]
local owner, pushed, cancelled = unpack(redis.call('HMGET', key, 'owner', 'pushed', 'cancelled'))
if owner ~= ARGV[2] then return -1 end
if cancelled or result_status(request) ~= '' then return 0 end
redis.call('HSET', key, 'cancelled', now_ms(), 'ended', 1)
redis.call('PEXPIRE', key, ARGV[4])
if pushed then
  redis.call('ZADD', 'warmq:revoked', math.floor(now_ms() / 1000) + tonumber(ARGV[5]), request)
  redis.call('PUBLISH', 'warmq:cancel', cjson.encode({ request }))
end
return 1
