-- The functions that all scripts share (contract/redis/scripts.py). docs/reference/redis-keys.md lists the keys.
-- Every time is from Redis's TIME, in ms.
-- "Touches" in a script's header names keys and channels. Two words there stand for several of them:
--   endings: celery-task-meta-<id> (key and channel), warmq:batch:<id>*, warmq:retiring,
--     warmq:gateway:due:notify, channel warmq:batch-cancel (commit, apply_to_batches)
--   turns: warmq:turns:*, warmq:used:*, warmq:tenants (turns.lua)
-- Nearly all scripts also touch warmq:leases (allow_when_full).

local RESULT = 'celery-task-meta-'
-- The version of the format of warmq's data in Redis (contract/version.py).
local PROTOCOL = 2
-- A number in a key's name is the protocol in which the key got its format.
local LEASES, RETIRING = 'warmq:leases:2', 'warmq:retiring:2'
local NOTIFY = 'warmq:gateway:due:notify' -- ended batches whose webhook a worker has to post
local function worker_key(worker) return 'warmq:worker:2:' .. worker end

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

-- Lets the rest of the script write while Redis uses more than its maxmemory: Redis checks the first write
-- of a script only, and refuses no write that removes; this ZREM removes a member that does not exist. CREATE,
-- ENQUEUE and OBJECT_PUT, which add work, call this function only after a check of their own.
local function allow_when_full()
  redis.call('ZREM', LEASES, '')
end

-- Does the same in scripts that need not write; returns whether Redis takes writes. A replica takes none, nor
-- does a Redis that cannot write to its disk.
local function may_write()
  local reply = redis.pcall('ZREM', LEASES, '')
  return type(reply) ~= 'table' or not reply.err
end

-- Calls a command with any number of values: unpack() overflows Lua's stack at 8000.
local function call_many(command, key, values)
  for i = 1, #values, 1000 do
    redis.call(command, key, unpack(values, i, math.min(i + 999, #values)))
  end
end

-- Calls a command for any number of fields or members; returns the list of their replies.
local function ask_many(command, key, names)
  local replies = {}
  for i = 1, #names, 1000 do
    local last = math.min(i + 999, #names)
    local reply = redis.call(command, key, unpack(names, i, last))
    for n = i, last do replies[n] = reply[n - i + 1] end
  end
  return replies
end

local function batch_key(id) return 'warmq:batch:' .. id end

-- The key of the message of an ended request, which RETRY may queue again.
local function kept_key(batch, id) return batch_key(batch) .. ':kept:' .. id end

-- The batches that this script has read, by id: their state at its start, and what apply_to_batches adds to
-- their counters and lists of finished requests. `life` tells a batch from a deleted one with the same id:
-- CREATE makes it at random, and each message of the batch has it. It is nil here for a batch that is gone
-- or being deleted.
local batches = {}
local function batch_state(id)
  local state = batches[id]
  if not state then
    -- pcall, because a forged batch id may name a key of another type.
    local found = redis.pcall('HMGET', batch_key(id), 'life', 'finished_at', 'cancelling', 'list', 'identical',
                              'deleting', 'completed', 'prompt_tokens', 'completion_tokens', 'cached', 'requeued_at')
    local life, finished, cancelling, list, identical, deleting, completed, prompt, completion, cached, requeued =
      unpack(found)
    state = { added = {}, ended = {} }
    if not found.err and not deleting then
      state.life, state.finished, state.cancelling = life, finished, cancelling
      state.list, state.dedupe, state.requeued = list, identical, requeued
      completed = tonumber(completed or 0) - tonumber(cached or 0) -- `cached`: answered by --reuse
      -- With --dedupe `completed` also counts followers, whose tokens are counted once.
      if completed > 0 and not identical then
        local tokens = tonumber(prompt or 0) + tonumber(completion or 0)
        state.mean = tokens > 0 and math.max(1, math.floor(tokens / completed)) or nil
      end
    end
    batches[id] = state
  end
  return state
end

-- Returns whether the batch exists with this life and is not being deleted.
local function batch_alive(id, life)
  return life ~= '' and batch_state(id).life == life
end

-- Adds a number to a counter of a batch; apply_to_batches writes the sum.
local function add(state, field, number)
  if number ~= 0 then state.added[field] = (state.added[field] or 0) + number end
  state.touched = true
end

-- Notes a failure, which apply_to_batches adds to the batch's failures by code.
local function note_failure(state, id, meta, lines)
  state.failures = state.failures or {}
  table.insert(state.failures, { id = id, code = code_in(meta), lines = lines })
end

-- Returns whether the result under the id of a batch's request is that of a plain Celery request, which may use
-- any id. While the batch is unfinished, only a plain request's result has an expiry.
local function is_foreign_result(id, state)
  return not state.finished and redis.call('PTTL', RESULT .. id) > 0
end

-- The key of the followers of a batch submitted with --dedupe: lines that get the result of an earlier line,
-- their leader. <leader's request id> -> number of followers; <leader's request id> NUL <n> -> the n-th follower,
-- from 1, as JSON: the first three values of its entry in the index.
local function followers_key(batch) return batch_key(batch) .. ':identical' end

-- Returns the number of followers that a request of a batch has now.
local function followers_of(batch, id)
  if not batch_state(batch).dedupe then return 0 end
  return tonumber(redis.call('HGET', followers_key(batch), id)) or 0
end

-- Returns the entry in the list of finished requests for a leader's followers from number `from` to `to`.
local function ended_followers(leader, from, to)
  return string.format('%s\0%d\0%d', leader, from, to)
end

-- Returns for how many ms the result of a request without a batch is kept: as its message asks (`keep_ms`),
-- but no longer than the default. The message may have any JSON there, and cjson reads even nan.
local function kept_ms(asked, ttl_ms)
  asked = tonumber(asked)
  return asked and asked >= 1 and asked <= ttl_ms and math.floor(asked) or ttl_ms
end

-- Writes a request's result unless it has one; returns whether it wrote. `batch` is '' for a request without
-- a batch.
local function commit(id, meta, outcome, batch, life, ttl_ms, prompt_tokens, completion_tokens)
  local state = batch ~= '' and batch_state(batch)
  if state and (state.life ~= life or life == '' or state.finished) then return false end
  if not redis.call('SET', RESULT .. id, meta, 'NX') then
    if not state or not is_foreign_result(id, state) then return false end
    redis.call('SET', RESULT .. id, meta)
  end
  if state then
    local followers = followers_of(batch, id)
    add(state, outcome, 1 + followers)
    if outcome == 'failed' then note_failure(state, id, meta, 1 + followers) end
    add(state, 'prompt_tokens', prompt_tokens)
    add(state, 'completion_tokens', completion_tokens)
    state.ended[#state.ended + 1] = id
    if followers > 0 then state.ended[#state.ended + 1] = ended_followers(id, 1, followers) end
  else
    redis.call('PEXPIRE', RESULT .. id, ttl_ms)
  end
  redis.call('PUBLISH', RESULT .. id, meta)
  return true
end

-- Writes the result of a request that no worker ran to its end. A plain Celery request may want no result.
local function commit_ending(request, meta, outcome, ttl_ms)
  if request.ignored and request.batch == '' then return false end
  local keep_ms = kept_ms(request.keep_ms, ttl_ms)
  return commit(request.id, meta, outcome, request.batch, request.life, keep_ms, 0, 0)
end

-- Adds to the batches' counters what this script has committed, and finishes sealed batches of which all
-- requests have ended. A script calls it once, at its end.
local function apply_to_batches(now)
  for id, state in pairs(batches) do
    if state.touched then
      local key = batch_key(id)
      for field, number in pairs(state.added) do
        redis.call('HINCRBY', key, field, string.format('%.0f', number))
      end
      call_many('RPUSH', key .. ':finished', state.ended)
      if state.failures then
        change_failures(key, state.failures)
        stop_if_failing(id, key)
      end
      local sealed, finished_at, total, completed, failed, cancelled, expired = unpack(redis.call(
        'HMGET', key, 'sealed', 'finished_at', 'total', 'completed', 'failed', 'cancelled', 'expired'))
      if sealed and not finished_at then
        local terminal = tonumber(completed or 0) + tonumber(failed or 0) + tonumber(cancelled or 0)
          + tonumber(expired or 0)
        if terminal == tonumber(total) then
          redis.call('HSET', key, 'finished_at', now)
          redis.call('ZADD', RETIRING, now, id)
          if redis.call('HEXISTS', key, 'notify') == 1 then redis.call('ZADD', NOTIFY, now, id) end
        end
      end
    end
  end
end

-- Makes the webhook of a finished batch due, unless it is due already or was tried since the batch's end. A
-- worker of 0.2.0, which knows no webhooks, may have ended the batch.
local function note_missed_webhook(id)
  local found = redis.pcall('HMGET', batch_key(id), 'finished_at', 'notify', 'notified', 'deleting')
  local finished_at, notify, notified, deleting = unpack(found)
  if found.err or not finished_at or not notify or deleting then return end
  local tried = string.match(notified or '', '^%d+') == finished_at
  if not tried and not redis.call('ZSCORE', NOTIFY, id) then redis.call('ZADD', NOTIFY, now_ms(), id) end
end

-- Returns the first bytes of a stored result, which have its status; '' if there is none.
local FAILURE = '{"status":"FAILURE"'
local function result_status(id) return redis.call('GETRANGE', RESULT .. id, 0, 18) end

-- The first bytes of each value in warmq:batch:<id>:failed. A `producer` of 0.1.0 takes them for the key of
-- a message; that key has another type, so its retry fails before it changes anything.
local NOTE = 'warmq:batches\0'

-- Notes a request that RETRY may run again: its outcome, and `home`, its home list, to which RETRY moves its kept
-- message. If `home` is '', the message is not kept yet: it still waits in the queue or runs.
local function note_ended(batch, id, outcome, size, home)
  local key = batch_key(batch)
  redis.call('HSET', key .. ':failed', id, NOTE .. outcome .. '\0' .. size .. '\0' .. home)
  local ttl_ms = batch_state(batch).finished and redis.call('HGET', key, 'retiring')
  if ttl_ms then -- RETIRE has begun; the batch's own keys may have their expiry already
    local left = redis.call('PTTL', key)
    redis.call('PEXPIRE', kept_key(batch, id), left > 0 and left or ttl_ms)
    if left > 0 then redis.call('PEXPIRE', key .. ':failed', left) end
  end
end

-- Returns what note_ended has noted of a request: outcome and home list; nil if it has noted nothing.
local function noted_ending(batch, id)
  local note = redis.call('HGET', batch_key(batch) .. ':failed', id)
  if not note then return nil end
  return string.match(note, '^(%Z*)%z%d+%z(.*)$', #NOTE + 1)
end

-- The field of warmq:deaths that counts the deaths of engines that ran no other request.
local function alone_field(id) return id .. '\0alone' end

-- The key of the list of a request's attempts without an answer, the last one first.
local function attempts_key(id) return 'warmq:attempts:' .. id end

-- Removes the counts of a request's returns and deaths.
local function forget_counts(id)
  redis.call('HDEL', 'warmq:returns', id)
  redis.call('HDEL', 'warmq:deaths', id, alone_field(id))
end

-- Removes a dead letter and its message; returns how many there were.
local function forget_letter(letter)
  redis.call('UNLINK', 'warmq:dead:' .. letter)
  return redis.call('HDEL', 'warmq:dead', letter)
end

-- Bytes that an object of the gateways is counted to take in addition to its document: key, fields, entries
-- of lists. The object of an empty file takes 1.5 kB in all.
local RECORD_BYTES = 1024

-- Counts the bytes of an owner's object ('<kind>:<id>'), 0 if it is gone, in warmq:gateway:records and
-- warmq:gateway:records:<owner>.
local function count_record(owner, name, bytes)
  local each, sums = 'warmq:gateway:records:' .. owner, 'warmq:gateway:records'
  local before = tonumber(redis.call('HGET', each, name) or 0)
  if bytes == before then return end
  if bytes > 0 then redis.call('HSET', each, name, bytes) else redis.call('HDEL', each, name) end
  if redis.call('HINCRBY', sums, owner, bytes - before) <= 0 then redis.call('HDEL', sums, owner) end
end
