-- HOLD: remove the expiries that RETIRE has set on a finished batch, a chunk of its index at a time, so that RETRY
-- can open the batch again. RETIRE does not touch the batch for a minute after each call; then it sets the
-- expiries again.
-- ARGV: batch, life, request ids of one chunk (none in the first call)
-- Touches: warmq:batch:<id>*, warmq:retiring, celery-task-meta-<id>
-- Returns: 1, or 0 if the batch is gone.
allow_when_full()
local key = batch_key(ARGV[1])
local held = key .. ':held'
if not batch_alive(ARGV[1], ARGV[2]) then return 0 end
-- The keys of an unfinished batch have no expiry. A result with one is a plain Celery client's (see
-- is_foreign_result) and keeps it.
if not batch_state(ARGV[1]).finished then return 1 end
redis.call('ZADD', RETIRING, now_ms() + 60000, ARGV[1])
for _, part in ipairs({ ':index', ':columns', ':identical', ':finished', ':failed', '' }) do
  redis.call('PERSIST', key .. part)
end
for i = 3, #ARGV do
  redis.call('PERSIST', RESULT .. ARGV[i])
  redis.call('PERSIST', kept_key(ARGV[1], ARGV[i]))
end
-- `held` has the first request id of each chunk held since the last RETIRE. RETRY may begin when it has all
-- chunks.
if redis.call('HEXISTS', key, 'retiring') == 1 then
  if ARGV[3] then
    redis.call('SADD', held, ARGV[3])
    redis.call('PEXPIRE', held, 3600000)
  end
  if #redis.call('SMEMBERS', held) >= redis.call('LLEN', key .. ':index') then
    redis.call('HDEL', key, 'retiring')
    redis.call('DEL', held)
  end
end
return 1
