-- RELEASE: hand deliveries back to the head of their own lists. Requests with max_deaths deaths become suspects
-- instead.
-- ARGV: worker, max_deaths, ttl_ms, date, then pairs (lease id, 1 if the engine died with the request inside,
--   else 0), newest lease first
-- Touches: warmq:worker:<worker>, warmq:leased:<lease>, warmq:dead:<n>, warmq:{leases,sequences,returns,deaths,
--   dead,lease_seq}, warmq:attempts:<id>, the lists of waiting messages, <queue>:suspects*, turns, endings
-- Returns: {number of deliveries handed back, more}; more is 1 if messages have yet to be moved: call again
--   without pairs.
local worker, max_deaths, ttl_ms, date = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local now, leases = now_ms(), {}
allow_when_full()
for i = 5, #ARGV, 2 do
  local record = redis.call('HGET', worker_key(worker), ARGV[i])
  local expiry = redis.call('ZSCORE', LEASES, ARGV[i])
  if record and expiry and tonumber(expiry) >= 0 then
    local leased = unpack_lease(record)
    leased.lease, leased.died = ARGV[i], ARGV[i + 1] == '1'
    leases[#leases + 1] = leased
  end
end
if #leases > 0 then hand_back(worker, leases, max_deaths, now, date, ttl_ms) end
apply_to_batches(now)
apply_charges()
return { #leases, move_back() }
