-- NOTIFIED: record a try of a batch's webhook. Afterwards the webhook is due at the time of its next try; without a
-- next try it is not due again. If the batch was retried and has ended again since the try began, it is due now.
-- ARGV: batch, token of the claim, finished_at that the worker read ('': the batch has not ended), ms until the
--   next try ('': none), why the webhook was not delivered ('': it was)
-- Touches: warmq:batch:<id>, warmq:gateway:due:notify, warmq:gateway:due:notify:held
-- Returns: 1; 0 if the claim has ended: then nothing is written.
allow_when_full()
local batch, token, ended, wait, problem = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local key, held, now = batch_key(batch), NOTIFY .. ':held', now_ms()
if redis.call('HGET', held, batch) ~= token then return 0 end
redis.call('HDEL', held, batch)
local finished_at = redis.call('HGET', key, 'finished_at') or ''
if finished_at ~= ended then
  wait = finished_at ~= '' and 0 or nil
elseif ended ~= '' then
  redis.call('HSET', key, 'notified', string.format('%s %.0f %s', ended, now, problem))
end
if wait then redis.call('ZADD', NOTIFY, now + wait, batch) else redis.call('ZREM', NOTIFY, batch) end
return 1
