-- RENEW: extend the leases that a worker names.
-- ARGV: worker, lease_ms, lease ids...
-- Touches: warmq:leases, warmq:worker:<worker>
-- Returns: {ids of named leases that the worker no longer has, ids of unnamed leases that it has}. The reply of
--   the POP that took an unnamed lease was lost, or is on its way.
local worker_hash, expiry = worker_key(ARGV[1]), now_ms() + tonumber(ARGV[2])
allow_when_full()
-- Returns whether a lease exists, and its message is not returning to the queue (a negative score).
local function is_held(lease)
  local score = redis.call('ZSCORE', LEASES, lease)
  return score and tonumber(score) >= 0
end
local lost, unnamed, named = {}, {}, {}
for i = 3, #ARGV do
  named[ARGV[i]] = true
  if is_held(ARGV[i]) then
    redis.call('ZADD', LEASES, 'XX', expiry, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
for _, lease in ipairs(redis.call('HKEYS', worker_hash)) do
  if not named[lease] and is_held(lease) then unnamed[#unnamed + 1] = lease end
end
return { lost, unnamed }
