-- DEAD RETRY: queue dead letters again at the end of their own lists. One that another delivery answered
-- meanwhile, or whose batch is gone, is only forgotten. Past deadlines are lifted, and Celery's `expires`
-- always, which Lua cannot read.
-- ARGV: dead letter ids
-- Touches: warmq:{dead,returns,deaths,retiring,revoked}, warmq:dead:<n>, the lists of waiting messages, warmq:turns:*,
--   celery-task-meta-<id>, warmq:batch:<id>
-- Returns: how many were queued again (unreadable ones stay, and those of a batch that RETIRE has
--   met: HOLD must come first).
unblock()
local count, moved, now = 0, 0, now_ms()

-- Whether a stored failure is this request's own: any client may use any id.
local function is_own(id, batch)
  local ok, meta = pcall(cjson.decode, redis.call('GET', RESULT .. id))
  local ours = ok and type(meta) == 'table' and meta['warmq']
  local named = type(ours) == 'table' and ours['batch']
  return (type(named) == 'string' and named or '') == batch
end

local function undo_failure(id, batch)
  redis.call('DEL', RESULT .. id)
  if batch == '' then return end
  local key = batch_key(batch)
  redis.call('HINCRBY', key, 'failed', -1 - followers_of(batch, id))
  redis.call('HDEL', key, 'finished_at')
  redis.call('HINCRBY', key, 'retried', 1)
  redis.call('ZREM', RETIRING, batch)
end

-- Whether the request has its answer, or can have none.
local function is_settled(id, batch, life, failed)
  if batch == '' then return redis.call('EXISTS', RESULT .. id) == 1 and not failed end
  if not batch_alive(batch, life) then return true end
  return redis.call('EXISTS', RESULT .. id) == 1 and not failed and not foreign(id, batch_state(batch))
end

for i = 1, #ARGV do
  local record = redis.call('HGET', 'warmq:dead', ARGV[i])
  local home, id, batch, life = string.match(record or '', '^%d+%z%d+%z(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)%z')
  if id and id ~= '' then
    local failed = result_status(id) == FAILURE and is_own(id, batch)
    local message = redis.call('LINDEX', 'warmq:dead:' .. ARGV[i], 0)
    if is_settled(id, batch, life, failed) or not message then -- without its message nothing can run
      forget_letter(ARGV[i])
    elseif batch == '' or redis.call('HEXISTS', batch_key(batch), 'retiring') == 0 then
      moved = moved + #message
      redis.call('LPUSH', home, without_expires(without_past_deadline(message, now)))
      note_pushed(home, 1)
      if failed then undo_failure(id, batch) end
      redis.call('ZREM', 'warmq:revoked', id)
      forget_counts(id)
      forget_letter(ARGV[i])
      count = count + 1
    end
  end
end
if moved > 1024 * 1024 then collectgarbage() end -- its copies stay in Lua's memory
return count
