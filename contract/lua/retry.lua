-- RETRY: queue ended requests of a batch again. If a cancelled request's message still waits in the queue, RETRY
-- removes the request's result and moves no message. A deadline that has passed is removed from the messages and
-- the batch.
-- ARGV: batch, life, then pairs (request id, outcome to undo)
-- Touches: warmq:batch:<id>*, celery-task-meta-<id>, the lists of waiting messages,
--   warmq:{returns,deaths,retiring,revoked}, turns
-- Returns: how many lines will have a new answer (a request whose kept message is gone keeps its ending);
--   -1 if the batch is gone; -2 if RETIRE has set expiries: the caller must run HOLD (again) first.
allow_when_full()
local batch, life = ARGV[1], ARGV[2]
local key = batch_key(batch)
if not batch_alive(batch, life) then return -1 end
if redis.call('HEXISTS', key, 'retiring') == 1 then return -2 end
local count, moved_bytes, now, undone = 0, 0, now_ms(), {}
for i = 3, #ARGV, 2 do
  local id, outcome = ARGV[i], ARGV[i + 1]
  local noted, home_list = noted_ending(batch, id)
  local gone = false
  -- Another retry may have undone this outcome meanwhile.
  if noted == outcome then
    if home_list ~= '' then -- the message is kept: it no longer waits in the queue
      -- The message goes to the left end of the list, which POP reaches last: the request waits like a new one.
      local message = redis.call('LMOVE', kept_key(batch, id), home_list, 'LEFT', 'LEFT')
      gone = not message
      local changed = message and queued_now(without_past_deadline(message, now), now)
      if changed ~= message then redis.call('LSET', home_list, 0, changed) end
      if message then note_pushed(home_list, 1) end
      moved_bytes = moved_bytes + #(message or '')
    end
  end
  -- A request without a message keeps its ending: otherwise the batch would never finish.
  if noted == outcome and not gone then
    local lines = 1 + followers_of(batch, id)
    if outcome == 'failed' then
      undone[#undone + 1] = { id = id, code = code_in(redis.call('GET', RESULT .. id)), lines = -lines }
    end
    redis.call('HDEL', key .. ':failed', id)
    redis.call('DEL', RESULT .. id)
    redis.call('HINCRBY', key, outcome, -lines)
    redis.call('ZREM', 'warmq:revoked', id)
    forget_counts(id)
    count = count + lines
  end
end
if #undone > 0 then change_failures(key, undone) end
-- The messages of a cancelled batch may still wait in the queue as they are.
if count > 0 and batch_state(batch).cancelling then redis.call('HSET', key, 'requeued_at', now) end
if count > 0 then reopen_batch(batch, count, now) end
if moved_bytes > 1024 * 1024 then collectgarbage() end -- else LMOVE's replies stay in Lua's memory
return count
