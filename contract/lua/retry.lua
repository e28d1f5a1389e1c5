-- RETRY: run ended requests of a batch again. A request whose message is still
-- queued (cancelled, not yet met by POP) only loses its result. A deadline that has
-- passed is lifted, from the messages and from the batch.
-- ARGV: batch, created, then pairs (request id, outcome that is undone)
-- Touches: warmq:batch:<id>*, celery-task-meta-<id>, kombu's lists, warmq:{returns,deaths,retiring}
-- Returns: how many will run again; -1 if the batch is gone.
local batch, created = ARGV[1], ARGV[2]
local key = batch_key(batch)
if not batch_alive(batch, created) then return -1 end
local count, now = 0, now_ms()
for i = 3, #ARGV, 2 do
  local id, outcome = ARGV[i], ARGV[i + 1]
  local stored = redis.call('HGET', key .. ':failed', id)
  local status = result_status(id)
  -- Another retry may have been faster: what it undid is not undone twice.
  if stored and status == FAILURE and outcome == 'failed'
     or status == REVOKED and (outcome == 'cancelled' or stored and outcome == 'expired') then
    if stored then
      local at = string.find(stored, '\0', 1, true)
      local message = without_past_deadline(string.sub(stored, at + 1), now)
      redis.call('LPUSH', without_suspects(string.sub(stored, 1, at - 1)), message)
      redis.call('HDEL', key .. ':failed', id)
    end
    redis.call('DEL', RESULT .. id)
    redis.call('HINCRBY', key, outcome, -1)
    forget_counts(id)
    count = count + 1
  end
end
if count > 0 then
  redis.call('HDEL', key, 'finished_at', 'cancelling')
  local deadline = tonumber(redis.call('HGET', key, 'deadline') or '')
  if deadline and deadline <= now then redis.call('HDEL', key, 'deadline') end
  redis.call('HINCRBY', key, 'retried', count)
  redis.call('ZREM', 'warmq:retiring', batch)
end
return count
