-- Shared by every script (contract/redis/scripts.py). Keys are listed in docs/reference/redis-keys.md. Time is
-- always Redis TIME, in ms.

local RESULT = 'celery-task-meta-'
-- The form of Redis' content (contract/version.py).
local PROTOCOL = 2
-- A number in a name is the protocol that gave the key its form.
local LEASES, RETIRING = 'warmq:leases:2', 'warmq:retiring:2'
local function worker_key(worker) return 'warmq:worker:2:' .. worker end

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

-- Under maxmemory Redis refuses a script whose FIRST write may grow memory, and lets every later one pass:
-- scripts that must run then (all but CREATE of a new batch) begin with a write that only frees.
local function unblock()
  redis.call('ZREM', LEASES, '')
end

-- The same for scripts that read and only tidy up: returns whether Redis takes writes at all. A replica, or
-- a full disk, takes none.
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

-- Calls a command for any number of fields or members; returns a reply for each.
local function ask_many(command, key, names)
  local found = {}
  for i = 1, #names, 1000 do
    local last = math.min(i + 999, #names)
    local reply = redis.call(command, key, unpack(names, i, last))
    for n = i, last do found[n] = reply[n - i + 1] end
  end
  return found
end

local function batch_key(id) return 'warmq:batch:' .. id end

-- The message of an ended request that RETRY may need.
local function kept_key(batch, id) return batch_key(batch) .. ':kept:' .. id end

-- Batches that this script has read: the state at its start, and what it adds to their counters and to the
-- list of finished requests (apply_to_batches). `life` is nil for a batch that is gone or being deleted. It
-- is random and only CREATE writes it: a message that has it was queued by ENQUEUE for this batch, not for
-- a deleted one of the same name.
local batches = {}
local function batch_state(id)
  local state = batches[id]
  if not state then
    -- pcall: a forged name may lead to a key of another type.
    local found = redis.pcall('HMGET', batch_key(id), 'life', 'finished_at', 'cancelling', 'list', 'identical',
                              'deleting', 'completed', 'prompt_tokens', 'completion_tokens')
    local life, finished, cancelling, list, identical, deleting, completed, prompt, completion = unpack(found)
    state = { added = {}, ended = {} }
    if not found.err and not deleting then
      state.life, state.finished, state.cancelling = life, finished, cancelling
      state.list, state.dedupe = list, identical
      completed = tonumber(completed or 0)
      if completed > 0 and not identical then -- lines that share an answer are counted, too
        local tokens = tonumber(prompt or 0) + tonumber(completion or 0)
        state.mean = tokens > 0 and math.max(1, math.floor(tokens / completed)) or nil
      end
    end
    batches[id] = state
  end
  return state
end

local function batch_alive(id, life)
  return life ~= '' and batch_state(id).life == life
end

local function add(state, field, number)
  if number ~= 0 then state.added[field] = (state.added[field] or 0) + number end
  state.touched = true
end

-- Whether a stored result belongs to another request: results of an unfinished batch have no expiry, those
-- of plain Celery requests, which may use any id, always have one.
local function foreign(id, state)
  return not state.finished and redis.call('PTTL', RESULT .. id) > 0
end

-- Followers of a batch submitted with --dedupe: lines that a leader's result answers too. <leader's request
-- id> -> how many; <leader's request id> NUL <n> -> the n-th, from 1, as its entry in the index begins.
local function followers_key(batch) return batch_key(batch) .. ':identical' end

-- How many followers a request of a batch has now.
local function followers_of(batch, id)
  if not batch_state(batch).dedupe then return 0 end
  return tonumber(redis.call('HGET', followers_key(batch), id)) or 0
end

-- The entry in the list of finished requests for followers that have ended, by their numbers.
local function ended_followers(leader, from, to)
  return string.format('%s\0%d\0%d', leader, from, to)
end

-- Life in ms of the result of a request without a batch: as its message asks (`keep_ms`), but no longer
-- than the default. The message may have anything there, and cjson reads even nan.
local function kept_ms(asked, ttl_ms)
  asked = tonumber(asked)
  return asked and asked >= 1 and asked <= ttl_ms and math.floor(asked) or ttl_ms
end

-- Writes a terminal result once. batch == '' means a plain Celery request.
local function commit(id, meta, outcome, batch, life, ttl_ms, prompt_tokens, completion_tokens)
  local state = batch ~= '' and batch_state(batch)
  if state and (state.life ~= life or life == '' or state.finished) then return false end
  if not redis.call('SET', RESULT .. id, meta, 'NX') then
    if not state or not foreign(id, state) then return false end
    redis.call('SET', RESULT .. id, meta)
  end
  if state then
    local followers = followers_of(batch, id)
    add(state, outcome, 1 + followers)
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

-- Writes an ending that no worker computed. A plain Celery request may want no result.
local function commit_ending(request, meta, outcome, ttl_ms)
  if request.ignored and request.batch == '' then return false end
  local keep_ms = kept_ms(request.keep_ms, ttl_ms)
  return commit(request.id, meta, outcome, request.batch, request.life, keep_ms, 0, 0)
end

-- Adds to the batches' counters what this script has committed, and finishes batches that are sealed and
-- have no open line. Called once, at a script's end.
local function apply_to_batches(now)
  for id, state in pairs(batches) do
    if state.touched then
      local key = batch_key(id)
      for field, number in pairs(state.added) do
        redis.call('HINCRBY', key, field, string.format('%.0f', number))
      end
      call_many('RPUSH', key .. ':finished', state.ended)
      local found = redis.call('HMGET', key, 'sealed', 'finished_at', 'total', 'completed', 'failed',
                               'cancelled', 'expired')
      local sealed, finished_at, total = unpack(found)
      if sealed and not finished_at then
        local terminal = 0
        for i = 4, 7 do terminal = terminal + tonumber(found[i] or 0) end
        if terminal == tonumber(total) then
          redis.call('HSET', key, 'finished_at', now)
          redis.call('ZADD', RETIRING, now, id)
        end
      end
    end
  end
end

-- The start of a stored result, enough to tell its status; '' if there is none.
local FAILURE = '{"status":"FAILURE"'
local function result_status(id) return redis.call('GETRANGE', RESULT .. id, 0, 18) end

-- The beginning of a note.
local NOTE = 'warmq:batches\0'

-- Notes the outcome of a request that RETRY may run again, and the list to which its message, already moved
-- to its kept key, then goes; home == '': the message still waits in the queue.
local function note_ended(batch, id, outcome, size, home)
  local key = batch_key(batch)
  redis.call('HSET', key .. ':failed', id, NOTE .. outcome .. '\0' .. size .. '\0' .. home)
  local ttl_ms = batch_state(batch).finished and redis.call('HGET', key, 'retiring')
  if ttl_ms then -- RETIRE has been here; the batch's own keys may have their expiry already
    local left = redis.call('PTTL', key)
    redis.call('PEXPIRE', kept_key(batch, id), left > 0 and left or ttl_ms)
    if left > 0 then redis.call('PEXPIRE', key .. ':failed', left) end
  end
end

-- The outcome of a request that RETRY may run again, and the home of its kept message ('' if it still waits
-- in the queue); nil if it is not noted.
local function noted_ending(batch, id)
  local note = redis.call('HGET', batch_key(batch) .. ':failed', id)
  if not note then return nil end
  return string.match(note, '^(%Z*)%z%d+%z(.*)$', #NOTE + 1)
end

-- The field of warmq:deaths that counts deaths of an engine with nothing else in it.
local function alone(id) return id .. '\0alone' end

-- The list of a request's attempts that brought no answer, the last one first.
local function attempts_key(id) return 'warmq:attempts:' .. id end

local function forget_counts(id)
  redis.call('HDEL', 'warmq:returns', id)
  redis.call('HDEL', 'warmq:deaths', id, alone(id))
end

-- Removes a dead letter and its message; returns how many there were.
local function forget_letter(letter)
  redis.call('UNLINK', 'warmq:dead:' .. letter)
  return redis.call('HDEL', 'warmq:dead', letter)
end

-- Bytes of an object of the gateways beyond its document: key, fields, entries of lists. An empty file was
-- measured to take 1.5 kB in all.
local RECORD_BYTES = 1024

-- Sets the counted bytes of an owner's object ('<kind>:<id>'), 0 when it is gone, in warmq:gateway:records
-- and warmq:gateway:records:<owner>.
local function count_record(owner, name, bytes)
  local each, sums = 'warmq:gateway:records:' .. owner, 'warmq:gateway:records'
  local before = tonumber(redis.call('HGET', each, name) or 0)
  if bytes == before then return end
  if bytes > 0 then redis.call('HSET', each, name, bytes) else redis.call('HDEL', each, name) end
  if redis.call('HINCRBY', sums, owner, bytes - before) <= 0 then redis.call('HDEL', sums, owner) end
end
