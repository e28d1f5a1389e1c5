-- SUSPECTS LOCK: let one worker at a time run the suspects of a queue.
-- ARGV: suspects' list key, worker, ttl_ms; ttl_ms 0 gives the lock back
-- Touches: <queue>:suspects:lock, <queue>:suspects:group
-- Returns: 1 if the worker has the lock, or has given it back; else 0.
local lock, worker, ttl_ms = ARGV[1] .. ':lock', ARGV[2], tonumber(ARGV[3])
allow_when_full()
local holder = redis.call('GET', lock)
if ttl_ms == 0 then
  if holder ~= worker then return 0 end
  -- If no suspects are left, the group's size is deleted: the next group will have half of the suspects of then.
  if redis.call('EXISTS', ARGV[1]) == 0 then redis.call('DEL', ARGV[1] .. ':group') end
  redis.call('DEL', lock)
  return 1
end
if not holder or holder == worker then
  redis.call('SET', lock, worker, 'PX', ttl_ms)
  return 1
end
-- A TTL of more than a lease means that Redis's clock has stepped back: a dead holder must not keep the lock that
-- long.
if redis.call('PTTL', lock) > ttl_ms then redis.call('PEXPIRE', lock, ttl_ms) end
return 0
