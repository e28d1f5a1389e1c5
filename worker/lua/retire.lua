-- RETIRE: set the expiry of a finished batch's results, a chunk at a time. The last call sets the expiry of the
-- batch's own keys, so that they outlive the results.
-- ARGV: batch, life, ttl_ms, last 0|1, request ids...
-- Touches: warmq:batch:<id>*, warmq:retiring, celery-task-meta-<id>, warmq:gateway:due:notify
-- Returns: 1; 0 if the batch is gone, has another life, is not finished, or is held for RETRY (HOLD); -1 if it is
--   being deleted.
allow_when_full()
local batch, life, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
local key = batch_key(batch)
local finished_at, deleting, batch_life, keep_ms = unpack(redis.call('HMGET', key, 'finished_at', 'deleting',
                                                                     'life', 'keep_ms'))
if deleting then return -1 end
if not finished_at or not batch_life then -- 0.1.0 gave a batch no life
  redis.call('ZREM', RETIRING, batch)
  return 0
end
if batch_life ~= life then return 0 end
-- HOLD delays RETIRE for a minute. A longer delay means that Redis's clock has stepped back.
local held_ms = tonumber(redis.call('ZSCORE', RETIRING, batch) or 0) - now_ms()
if held_ms > 0 and held_ms <= 60000 then return 0 end
-- The results of a trial are kept for less time.
if keep_ms then ttl_ms = tostring(math.min(tonumber(ttl_ms), tonumber(keep_ms))) end
-- From now on RETRY is refused until HOLD has removed the expiries that are set below.
redis.call('HSET', key, 'retiring', ttl_ms)
redis.call('DEL', key .. ':held')
local any_kept = redis.call('EXISTS', key .. ':failed') == 1
for i = 5, #ARGV do
  redis.call('PEXPIRE', RESULT .. ARGV[i], ttl_ms)
  if any_kept then redis.call('PEXPIRE', kept_key(batch, ARGV[i]), ttl_ms) end
end
if ARGV[4] == '1' then
  note_missed_webhook(batch)
  for _, part in ipairs({ ':index', ':columns', ':identical', ':finished', ':failed', '' }) do
    redis.call('PEXPIRE', key .. part, ttl_ms)
  end
  redis.call('ZREM', RETIRING, batch)
end
return 1
