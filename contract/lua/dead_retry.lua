-- DEAD RETRY: give dead letters one more life at the end of their own queue. One that
-- another delivery answered meanwhile is only forgotten. Deadlines that have passed are
-- lifted, and Celery's `expires` too, which Lua cannot read.
-- ARGV: dead letter ids
-- Touches: warmq:{dead,returns,deaths,retiring}, kombu's lists, celery-task-meta-<id>, warmq:batch:<id>
-- Returns: how many were queued again (unreadable ones stay).
local EXPIRES = '("expires":%s*)"[^"\\]*"'
local count, now = 0, now_ms()
for i = 1, #ARGV do
  local record = redis.call('HGET', 'warmq:dead', ARGV[i])
  if record then
    local a = string.find(record, '\0', 1, true)
    local b = string.find(record, '\0', a + 1, true)
    local c = string.find(record, '\0', b + 1, true)
    local list, message = string.sub(record, b + 1, c - 1), string.sub(record, c + 1)
    local r = read_message(message)
    local status = r and result_status(r.id)
    if r and status ~= '' and status ~= FAILURE then
      redis.call('HDEL', 'warmq:dead', ARGV[i])
    elseif r and (r.batch == '' or batch_alive(r.batch, r.created)) then
      message = string.gsub(without_past_deadline(message, now), EXPIRES, '%1null')
      redis.call('LPUSH', without_suspects(list), message)
      if redis.call('DEL', RESULT .. r.id) == 1 and r.batch ~= '' then
        redis.call('HINCRBY', batch_key(r.batch), 'failed', -1)
        redis.call('HDEL', batch_key(r.batch), 'finished_at')
        redis.call('HINCRBY', batch_key(r.batch), 'retried', 1)
        redis.call('ZREM', 'warmq:retiring', r.batch)
      end
      forget_counts(r.id)
      redis.call('HDEL', 'warmq:dead', ARGV[i])
      count = count + 1
    end
  end
end
return count
