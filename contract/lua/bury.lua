-- BURY: a leased message that Python's stricter decoder refuses becomes a dead letter.
-- ARGV: worker, lease id, reason, ttl_ms, date
-- Touches: warmq:worker:<worker>, warmq:{leases,dead,lease_seq}, and what commit() touches
-- Returns: 1, or 0 if the lease was not ours any more.
local worker_hash, lease, reason = 'warmq:worker:' .. ARGV[1], ARGV[2], ARGV[3]
local record = redis.call('HGET', worker_hash, lease)
if not record then return 0 end
local now = now_ms()
redis.call('ZREM', 'warmq:leases', lease)
local _, list, message = split_record(record)
dead_letter(list, message, reason, now)
local r = read_message(message)
if r then
  local meta = ending_meta(r, 'FAILURE', 'RequestRejected', 'null', 'invalid_json', reason, ARGV[5])
  commit_ending(r, meta, 'failed', tonumber(ARGV[4]))
  forget_counts(r.id)
end
redis.call('HDEL', worker_hash, lease)
complete_touched(now)
return 1
