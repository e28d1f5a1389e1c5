-- DUE_SET: schedule work (again), or remove it when it is done.
-- ARGV: kind of work, id, token of who holds it ('' for new work, from anybody), ms from
--   now ('' : it is done)
-- Touches: warmq:gateway:due:<kind>, warmq:gateway:due:<kind>:held
-- Returns: 1; 0 if another one holds it now
unblock()
local due, id, token = 'warmq:gateway:due:' .. ARGV[1], ARGV[2], ARGV[3]
if token ~= '' then
  if redis.call('HGET', due .. ':held', id) ~= token then return 0 end
elseif redis.call('HEXISTS', due .. ':held', id) == 1 then
  -- It is claimed: it is due once more as soon as its claim ends.
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
