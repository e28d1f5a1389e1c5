-- RETRY: queue ended requests of a batch again. A request whose message is still queued (cancelled, not yet
-- met by POP) only loses its result. A past deadline is lifted, from the messages and from the batch.
-- ARGV: batch, life, then pairs (request id, outcome that is undone)
-- Touches: warmq:batch:<id>*, celery-task-meta-<id>, the lists of waiting messages,
--   warmq:{returns,deaths,retiring,revoked}, warmq:turns:*
-- Returns: how many lines will have an answer of a new run (a request whose kept message is gone stays
--   as it ended); -1 if the batch is gone, -2 if HOLD must
--   come first (again).
unblock()
local batch, life = ARGV[1], ARGV[2]
local key = batch_key(batch)
if not batch_alive(batch, life) then return -1 end
if redis.call('HEXISTS', key, 'retiring') == 1 then return -2 end
local count, moved, now = 0, 0, now_ms()
for i = 3, #ARGV, 2 do
  local id, outcome = ARGV[i], ARGV[i + 1]
  local noted, home = noted_ending(batch, id)
  local gone = false
  -- Another retry may have been faster: it is not undone twice.
  if noted == outcome then
    if home ~= '' then
      -- To the end of its list, as a message that is submitted now.
      local message = redis.call('LMOVE', kept_key(batch, id), home, 'LEFT', 'LEFT')
      gone = not message
      local lifted = message and without_past_deadline(message, now)
      if lifted ~= message then redis.call('LSET', home, 0, lifted) end
      if message then note_pushed(home, 1) end
      moved = moved + #(message or '')
    end
  end
  -- Without its message the batch would never end: the request stays as it ended.
  if noted == outcome and not gone then
    redis.call('HDEL', key .. ':failed', id)
    redis.call('DEL', RESULT .. id)
    local lines = 1 + followers_of(batch, id)
    redis.call('HINCRBY', key, outcome, -lines)
    redis.call('ZREM', 'warmq:revoked', id)
    forget_counts(id)
    count = count + lines
  end
end
if count > 0 then
  redis.call('HDEL', key, 'finished_at', 'cancelling')
  local deadline = tonumber(redis.call('HGET', key, 'deadline') or '')
  if deadline and deadline <= now then redis.call('HDEL', key, 'deadline') end
  redis.call('HINCRBY', key, 'retried', count)
  -- Cancelled before all its messages were queued: the same submit brings the rest.
  local there = redis.call('HMGET', key, 'planned', 'announced')
  if tonumber(there[1] or 0) < tonumber(there[2] or 0) then redis.call('HDEL', key, 'sealed') end
  redis.call('ZREM', RETIRING, batch)
end
if moved > 1024 * 1024 then collectgarbage() end -- what LMOVE answers stays in Lua's memory
return count
