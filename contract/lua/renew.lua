-- RENEW: prolong the leases this worker names.
-- ARGV: worker, lease_ms, lease ids...
-- Touches: warmq:leases, warmq:worker:<worker>
-- Returns: {lost ids, unknown ids}: lost are no longer ours; unknown are ours in
--   Redis although the worker does not know them (a POP whose reply was lost).
local worker_hash, expiry = 'warmq:worker:' .. ARGV[1], now_ms() + tonumber(ARGV[2])
unblock()
local lost, unknown, known = {}, {}, {}
for i = 3, #ARGV do
  known[ARGV[i]] = true
  if redis.call('HEXISTS', worker_hash, ARGV[i]) == 1 then
    redis.call('ZADD', 'warmq:leases', 'XX', expiry, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
for _, id in ipairs(redis.call('HKEYS', worker_hash)) do
  if not known[id] then unknown[#unknown + 1] = id end
end
return { lost, unknown }
