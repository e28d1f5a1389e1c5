-- BURY: make a leased message a dead letter, because the worker's Python code, stricter than Lua's, cannot
-- read it.
-- ARGV: worker, lease id, reason, ttl_ms, date
-- Touches: warmq:worker:<worker>, warmq:leased:<lease>, warmq:dead:<n>,
--   warmq:{leases,sequences,dead,lease_seq,returns,deaths}, turns, endings
-- Returns: 1; 0 if the worker no longer has the lease.
local worker_hash, lease, reason = worker_key(ARGV[1]), ARGV[2], ARGV[3]
local record = redis.call('HGET', worker_hash, lease)
if not record then return 0 end
local now, leased = now_ms(), unpack_lease(record)
allow_when_full()
local function ending(request)
  return ending_meta(request, 'RequestRejected', 'invalid_json', reason, ARGV[5])
end
give_up(lease, leased, reason, now, ending, tonumber(ARGV[4]))
-- With a negative score the charge ended when the message began to return.
if tonumber(redis.call('ZSCORE', LEASES, lease) or -1) >= 0 then
  end_charge(lease, leased.home, leased.cost, REJECTION)
end
drop_lease(ARGV[1], lease)
apply_charges()
apply_to_batches(now)
return 1
