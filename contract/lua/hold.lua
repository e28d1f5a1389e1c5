-- HOLD: take back the expiry of a finished batch, a chunk at a time: RETRY will open it again.
-- For a minute after each call RETIRE leaves it alone; then it gets its expiry anew.
-- ARGV: batch, life, request ids...
-- Touches: warmq:batch:<id>*, warmq:retiring, celery-task-meta-<id>
-- Returns: 1, or 0 if the batch is gone.
local key = batch_key(ARGV[1])
if not batch_alive(ARGV[1], ARGV[2]) then return 0 end
-- Of an unfinished batch nothing expires but results of others under the ids of its requests.
if not batch_state(ARGV[1]).finished then return 1 end
redis.call('HDEL', key, 'retiring')
redis.call('ZREM', OLDER_RETIRING, ARGV[1])
redis.call('ZADD', RETIRING, now_ms() + 60000, ARGV[1])
for _, part in ipairs({ ':index', ':identical', ':finished', ':failed', '' }) do
  redis.call('PERSIST', key .. part)
end
for i = 3, #ARGV do
  redis.call('PERSIST', RESULT .. ARGV[i])
  redis.call('PERSIST', kept_key(ARGV[1], ARGV[i]))
end
return 1
