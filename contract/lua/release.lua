-- RELEASE: hand unfinished deliveries back to the head of their own lists, at once.
-- ARGV: worker, max_deaths, ttl_ms, date, then pairs (lease id, died 0|1), newest first
-- Touches: warmq:worker:<worker>, warmq:{leases,returns,deaths,dead,lease_seq},
--   kombu's lists, <queue>:suspects*, and what commit() touches for a culprit
-- Returns: how many were handed back.
local worker, max_deaths, ttl_ms, date = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local now, leases = now_ms(), {}
unblock()
for i = 5, #ARGV, 2 do
  local record = redis.call('HGET', 'warmq:worker:' .. worker, ARGV[i])
  if record then leases[#leases + 1] = { id = ARGV[i], record = record, died = ARGV[i + 1] == '1' } end
end
hand_back(worker, leases, max_deaths, now, date, ttl_ms)
complete_touched(now)
return #leases
