-- DEAD RETRY: queue dead letters again, each at the end of its own list. A dead letter is removed without being
-- queued if its message or its batch is gone, or another delivery has answered its request. Celery's `expires` is
-- removed from the message, and so is a deadline that has passed.
-- ARGV: dead letter ids
-- Touches: warmq:{dead,returns,deaths,retiring,revoked}, warmq:dead:<n>, the lists of waiting messages, turns,
--   celery-task-meta-<id>, warmq:batch:<id>
-- Returns: how many were queued again. Unreadable dead letters stay. Those of a batch that RETIRE has begun with
--   stay, too: HOLD must come first.
allow_when_full()
local count, moved_bytes, now = 0, 0, now_ms()

-- Returns whether a stored failure is this request's, and not that of another client's request with the same id.
local function is_own(id, batch)
  local ok, meta = pcall(cjson.decode, redis.call('GET', RESULT .. id))
  local ours = ok and type(meta) == 'table' and meta['warmq']
  local named = type(ours) == 'table' and ours['batch']
  return (type(named) == 'string' and named or '') == batch
end

-- Removes the failure of a request that runs again, and opens its batch.
local function undo_failure(id, batch)
  local code = code_in(redis.call('GET', RESULT .. id))
  redis.call('DEL', RESULT .. id)
  if batch == '' then return end
  local key, lines = batch_key(batch), 1 + followers_of(batch, id)
  redis.call('HINCRBY', key, 'failed', -lines)
  change_failures(key, { { id = id, code = code, lines = -lines } })
  redis.call('HDEL', key, 'finished_at')
  redis.call('HINCRBY', key, 'retried', 1)
  redis.call('ZREM', RETIRING, batch)
end

-- Returns whether the request has an answer, or its batch is gone.
local function is_settled(id, batch, life, failed)
  if batch == '' then return redis.call('EXISTS', RESULT .. id) == 1 and not failed end
  if not batch_alive(batch, life) then return true end
  return redis.call('EXISTS', RESULT .. id) == 1 and not failed and not is_foreign_result(id, batch_state(batch))
end

for i = 1, #ARGV do
  local record = redis.call('HGET', 'warmq:dead', ARGV[i])
  -- The fields of pack_letter: at, size, home, request id, batch, life, ...
  local home, id, batch, life = string.match(record or '', '^%d+%z%d+%z(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)%z')
  if id and id ~= '' then
    local failed = result_status(id) == FAILURE and is_own(id, batch)
    local message = redis.call('LINDEX', 'warmq:dead:' .. ARGV[i], 0)
    if is_settled(id, batch, life, failed) or not message then -- without its message nothing can run
      forget_letter(ARGV[i])
    elseif batch == '' or redis.call('HEXISTS', batch_key(batch), 'retiring') == 0 then
      moved_bytes = moved_bytes + #message
      redis.call('LPUSH', home, without_expires(queued_now(without_past_deadline(message, now), now)))
      note_pushed(home, 1)
      if failed then undo_failure(id, batch) end
      redis.call('ZREM', 'warmq:revoked', id)
      forget_counts(id)
      forget_letter(ARGV[i])
      count = count + 1
    end
  end
end
if moved_bytes > 1024 * 1024 then collectgarbage() end -- its copies stay in Lua's memory
return count
