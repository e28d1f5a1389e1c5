-- HOLD: remove the expiry of a finished batch, a chunk at a time: RETRY will open it again. For a minute
-- after each call RETIRE leaves it alone; then it sets the expiry anew.
-- ARGV: batch, life, request ids of one chunk of its index (none to begin)
-- Touches: warmq:batch:<id>*, warmq:retiring, celery-task-meta-<id>
-- Returns: 1, or 0 if the batch is gone.
unblock()
local key = batch_key(ARGV[1])
local held = key .. ':held'
if not batch_alive(ARGV[1], ARGV[2]) then return 0 end
-- Of an unfinished batch nothing expires but foreign results under the ids of its requests.
if not batch_state(ARGV[1]).finished then return 1 end
redis.call('ZADD', RETIRING, now_ms() + 60000, ARGV[1])
for _, part in ipairs({ ':index', ':identical', ':finished', ':failed', '' }) do
  redis.call('PERSIST', key .. part)
end
for i = 3, #ARGV do
  redis.call('PERSIST', RESULT .. ARGV[i])
  redis.call('PERSIST', kept_key(ARGV[1], ARGV[i]))
end
-- The chunks held since the last RETIRE: RETRY may begin when these are all.
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
