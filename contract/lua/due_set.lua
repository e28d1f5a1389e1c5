-- DUE_SET: set the time at which work is due, or remove the work.
-- ARGV: kind of work, id, token of the caller's claim ('' without one), ms from now ('': remove the work)
-- Touches: warmq:gateway:due:<kind>, warmq:gateway:due:<kind>:held
-- Returns: 1; 0 if the caller's claim has ended: nothing is written
allow_when_full() -- work is scheduled also while Redis is full
local due, id, token = 'warmq:gateway:due:' .. ARGV[1], ARGV[2], ARGV[3]
if token ~= '' then
  if redis.call('HGET', due .. ':held', id) ~= token then return 0 end
elseif redis.call('HEXISTS', due .. ':held', id) == 1 then
  -- The work is claimed by another: it is due again as soon as that claim ends.
  redis.call('HSET', due .. ':held', id .. '\0again', 1)
  return 1
end
if ARGV[4] == '' then
  redis.call('ZREM', due, id)
  redis.call('HDEL', due .. ':held', id, id .. '\0again')
  return 1
end
redis.call('ZADD', due, now_ms() + tonumber(ARGV[4]), id)
return 1
