-- RETRY_CUT: queue again the requests of a batch whose answers were cut off at their max_tokens, and remove these
-- answers.
-- ARGV: batch, life, then four values per request: id, SHA-1 of the stored result in hex, queue, message
-- Touches: warmq:batch:<id>, celery-task-meta-<id>, the batch's lists, warmq:{returns,deaths,retiring,revoked}, turns
-- Returns: how many lines will have another answer (a result that has changed meanwhile stays); -1 if the
--   batch is gone; -2 if RETIRE has set expiries: the caller must run HOLD (again) first; -3 if the batch is being
--   cancelled.
allow_when_full()
local batch, life = ARGV[1], ARGV[2]
local key = batch_key(batch)
if not batch_alive(batch, life) then return -1 end
if redis.call('HEXISTS', key, 'retiring') == 1 then return -2 end
local state, lines, cut, pushed, now = batch_state(batch), 0, 0, {}, now_ms()
if state.cancelling and not state.finished then return -3 end -- reopen_batch would undo the cancel
for i = 3, #ARGV, 4 do
  local id = ARGV[i]
  local result = redis.call('GET', RESULT .. id)
  if result and redis.sha1hex(result) == ARGV[i + 1] and not is_foreign_result(id, state) then
    local list = list_in(ARGV[i + 2], state.list)
    redis.call('LPUSH', list, queued_now(ARGV[i + 3], now))
    pushed[list] = (pushed[list] or 0) + 1
    redis.call('DEL', RESULT .. id)
    redis.call('ZREM', 'warmq:revoked', id)
    forget_counts(id)
    lines, cut = lines + 1 + followers_of(batch, id), cut + 1
  end
end
for list, count in pairs(pushed) do note_pushed(list, count) end
if cut > 0 then
  redis.call('HINCRBY', key, 'completed', -lines)
  local left = tonumber(redis.call('HGET', key, 'cut') or 0) - cut
  redis.call('HSET', key, 'cut', math.max(0, left)) -- a worker of 0.2.0 counts no cut answers
  reopen_batch(batch, lines, now)
end
return lines
