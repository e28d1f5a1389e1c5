-- RETIRE: give results of a finished batch their expiry, a chunk at a time; with
-- the last call the batch's own keys get theirs, so they outlive the results.
-- ARGV: batch, ttl_ms, last 0|1, request ids...
-- Touches: warmq:batch:<id>*, warmq:retiring, celery-task-meta-<id>
-- Returns: 1, or 0 if the batch is not finished (any more): RETRY was faster.
local key = batch_key(ARGV[1])
if redis.call('HEXISTS', key, 'finished_at') == 0 then
  redis.call('ZREM', 'warmq:retiring', ARGV[1])
  return 0
end
for i = 4, #ARGV do redis.call('PEXPIRE', RESULT .. ARGV[i], ARGV[2]) end
if ARGV[3] == '1' then
  for _, part in ipairs({ ':index', ':finished', ':failed', '' }) do
    redis.call('PEXPIRE', key .. part, ARGV[2])
  end
  redis.call('ZREM', 'warmq:retiring', ARGV[1])
end
return 1
