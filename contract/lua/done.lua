-- DONE: end leases and commit their results, many at a time.
-- A success may be committed by anyone, any other ending only by the lease's
-- holder. `keep` = 1 stores the message for `producer retry`.
-- ARGV: worker, ttl_ms, then for each: lease id, request id, batch, created,
--   outcome ('' commits nothing, 'ignored' ends without a result), keep, prompt tokens,
--   completion tokens, meta
-- Touches: warmq:worker:<worker>, warmq:{leases,returns,deaths},
--   celery-task-meta-<id>, warmq:batch:<id>*
-- Returns: the number of results that were written.
local worker_hash, ttl_ms = 'warmq:worker:' .. ARGV[1], tonumber(ARGV[2])
local written = 0
for i = 3, #ARGV, 9 do
  local lease, id, batch, created, outcome = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local owned = redis.call('ZREM', 'warmq:leases', lease) == 1
  local record = owned and batch ~= '' and outcome ~= '' and redis.call('HGET', worker_hash, lease)
  -- Cancelled while it ran: `producer retry` needs the message, whatever the engine made of it.
  if record and batch_alive(batch, created)
     and (ARGV[i + 5] == '1' or result_status(id) == REVOKED) then
    local _, list, message = split_record(record)
    keep_message(batch, id, list, message)
  end
  redis.call('HDEL', worker_hash, lease)
  if outcome == 'completed' or (owned and outcome ~= '') then
    if outcome ~= 'ignored' and commit(id, ARGV[i + 8], outcome, batch, created, ttl_ms, tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7])) then
      written = written + 1
    end
    forget_counts(id)
  end
end
complete_touched(now_ms())
return written
