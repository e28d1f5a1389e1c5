-- Shared by every script (contract/scripts.py puts it in front of each).
-- Keys are listed in contract/keys.py. Time is always Redis TIME, in ms.
-- Under maxmemory Redis refuses a script whose FIRST write may grow memory, and
-- lets every later write pass; so scripts that must run then (all but ENQUEUE
-- and RETRY) begin with a write that only frees. That is what unblock() is for.

local RESULT = 'celery-task-meta-'
local touched = {}

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function unblock()
  redis.call('ZREM', 'warmq:leases', '')
end

local function batch_key(id) return 'warmq:batch:' .. id end

-- A batch lives while its hash carries the same creation time as the message:
-- a deleted and resubmitted batch must not see stragglers of its predecessor.
local function batch_alive(id, created)
  return redis.call('HGET', batch_key(id), 'created_at') == created
end

-- Writes a terminal result once. batch == '' means a plain Celery request.
local function commit(id, meta, outcome, batch, created, ttl_ms, prompt_tokens, completion_tokens)
  if batch ~= '' and not batch_alive(batch, created) then return false end
  if not redis.call('SET', RESULT .. id, meta, 'NX') then return false end
  if batch == '' then
    redis.call('PEXPIRE', RESULT .. id, ttl_ms)
  else
    local key = batch_key(batch)
    redis.call('HINCRBY', key, outcome, 1)
    if prompt_tokens > 0 then redis.call('HINCRBY', key, 'prompt_tokens', prompt_tokens) end
    if completion_tokens > 0 then redis.call('HINCRBY', key, 'completion_tokens', completion_tokens) end
    redis.call('RPUSH', key .. ':finished', id)
    touched[batch] = true
  end
  redis.call('PUBLISH', RESULT .. id, meta)
  return true
end

-- Writes an ending that no worker computed. A plain Celery request may want no result.
local function commit_ending(r, meta, outcome, ttl_ms)
  if r.ignored and r.batch == '' then return false end
  return commit(r.id, meta, outcome, r.batch, r.created, ttl_ms, 0, 0)
end

-- The start of a stored result, enough to tell its status; '' if there is none.
local REVOKED, FAILURE = '{"status":"REVOKED"', '{"status":"FAILURE"'
local function result_status(id) return redis.call('GETRANGE', RESULT .. id, 0, 18) end

local function keep_message(batch, id, list, message)
  redis.call('HSET', batch_key(batch) .. ':failed', id, list .. '\0' .. message)
end

-- The field of warmq:deaths that counts deaths of an engine with nothing else in it.
local function alone(id) return id .. '\0alone' end

local function forget_counts(id)
  redis.call('HDEL', 'warmq:returns', id)
  redis.call('HDEL', 'warmq:deaths', id, alone(id))
end

-- COMPLETE: sealed and every line terminal. Run once for each touched batch.
local function complete_touched(now)
  for batch in pairs(touched) do
    local key = batch_key(batch)
    local f = redis.call('HMGET', key, 'sealed', 'total', 'completed', 'failed',
                         'cancelled', 'expired', 'finished_at')
    if f[1] and not f[7] then
      local terminal = 0
      for i = 3, 6 do terminal = terminal + tonumber(f[i] or 0) end
      if terminal == tonumber(f[2]) then
        redis.call('HSET', key, 'finished_at', now)
        redis.call('ZADD', 'warmq:retiring', now, batch)
      end
    end
  end
end

-- Whether a text is UTF-8: what is not cannot be written into a result that a client reads.
local CONTINUED = '[\128-\191]'
local function is_utf8(text)
  if not string.find(text, '[\128-\255]') then return true end
  for _, sequence in ipairs({
    '[\194-\223]', '\224[\160-\191]', '[\225-\236\238\239]' .. CONTINUED, '\237[\128-\159]',
    '\240[\144-\191]' .. CONTINUED, '[\241-\243]' .. CONTINUED .. CONTINUED,
    '\244[\128-\143]' .. CONTINUED,
  }) do
    text = string.gsub(text, sequence .. CONTINUED, '?')
  end
  return not string.find(text, '[\128-\255]')
end

-- What warmq needs of a Celery protocol-2 message; nil and the reason if it is none.
local function read_message(message)
  local ok, m = pcall(cjson.decode, message)
  if not ok or type(m) ~= 'table' then return nil, 'not a JSON object' end
  local h = m['headers']
  if type(h) ~= 'table' then return nil, 'no headers: not a Celery protocol-2 message' end
  if type(h['id']) ~= 'string' or #h['id'] == 0 or #h['id'] > 255 or string.find(h['id'], '%c')
     or not is_utf8(h['id']) then
    return nil, 'headers.id is not a usable task id'
  end
  if type(m['body']) ~= 'string' or type(m['properties']) ~= 'table' then
    return nil, 'no body or no properties'
  end
  local out = { id = h['id'], batch = '', created = '', custom_id = cjson.null, line = cjson.null }
  out.ignored = h['ignore_result'] == true
  local w = h['warmq']
  if type(w) == 'table' then
    if type(w['batch']) == 'string' and is_utf8(w['batch']) then
      out.batch = w['batch']
      out.created = tostring(w['created'])
    end
    if type(w['custom_id']) == 'string' and is_utf8(w['custom_id']) then out.custom_id = w['custom_id'] end
    if type(w['line']) == 'number' then out.line = w['line'] end
    if type(w['deadline']) == 'number' then out.deadline = w['deadline'] end
  end
  return out
end

-- A retried request is not held to a deadline that has passed. The message is changed
-- as text: cjson would turn its empty lists into {}. Within a string the quotes would be
-- escaped, so these patterns meet nothing but the fields.
local DEADLINE = '("deadline":%s*)(%-?%d[%d.eE+-]*)'
local function without_past_deadline(message, now)
  local _, deadline = string.match(message, DEADLINE)
  if not deadline or (tonumber(deadline) or 0) * 1000 > now then return message end
  return (string.gsub(message, DEADLINE, '%1null'))
end

-- Celery's meta for an ending that no worker computed. Strings only through
-- cjson: it never sees a result body, whose empty lists it would turn into {}.
local function ending_meta(r, status, exc_type, exc_module, code, text, date)
  local function s(v) return cjson.encode(v) end
  local batch = r.batch == '' and 'null' or s(r.batch)
  return '{"status":"' .. status .. '","result":{"exc_type":"' .. exc_type ..
    '","exc_message":[' .. s(text) .. '],"exc_module":' .. exc_module ..
    '},"traceback":null,"children":[],"date_done":' .. s(date) .. ',"task_id":' .. s(r.id) ..
    ',"warmq":{"batch":' .. batch .. ',"custom_id":' .. s(r.custom_id) ..
    ',"line":' .. (type(r.line) == 'number' and string.format('%d', r.line) or 'null') ..
    ',"error":{"code":"' .. code .. '","message":' .. s(text) .. '}}}'
end

local function revoked_meta(r, code, text, date)
  return ending_meta(r, 'REVOKED', 'TaskRevokedError', '"celery.exceptions"', code, text, date)
end

-- A lease record is <slots> NUL <list key> NUL <message>.
local function split_record(record)
  local a = string.find(record, '\0', 1, true)
  local b = string.find(record, '\0', a + 1, true)
  return tonumber(string.sub(record, 1, a - 1)), string.sub(record, a + 1, b - 1), string.sub(record, b + 1)
end

local function dead_letter(list, message, reason, now)
  local seq = redis.call('INCR', 'warmq:lease_seq')
  redis.call('HSET', 'warmq:dead', seq, reason .. '\0' .. now .. '\0' .. list .. '\0' .. message)
end

local function without_suspects(list) return (string.gsub(list, ':suspects$', '')) end

local function suspects_of(list)
  return without_suspects(string.match(list, '^(.-)\6') or list) .. ':suspects'
end

-- Hands leases back to the head of their own lists. `leases` is a list of
-- {id, record, died}, newest first, so that the oldest is consumed next.
-- A death inside the suspects' list halves the group; who dies alone a second time is
-- the culprit: one death somebody else may have caused, from outside. Every record is
-- pushed before its lease is dropped.
local function hand_back(worker, leases, max_deaths, now, date, ttl_ms)
  local died_suspects, groups = {}, {}
  for _, l in ipairs(leases) do
    local _, list = split_record(l.record)
    if l.died and list == suspects_of(list) then
      died_suspects[list] = (died_suspects[list] or 0) + 1
    end
  end
  for _, l in ipairs(leases) do
    local _, list, message = split_record(l.record)
    local r = read_message(message)
    if r then
      redis.call('HINCRBY', 'warmq:returns', r.id, 1)
      local target = list
      if l.died then
        local deaths = redis.call('HINCRBY', 'warmq:deaths', r.id, 1)
        if deaths >= max_deaths then target = suspects_of(list) end
      end
      if died_suspects[list] == 1 and l.died
         and redis.call('HINCRBY', 'warmq:deaths', alone(r.id), 1) == 2 then
        local text = 'the engine died each time it ran this request'
        dead_letter(list, message, 'poison: ' .. text, now)
        commit_ending(r, ending_meta(r, 'FAILURE', 'RequestFailed', 'null', 'poison', text, date),
                      'failed', ttl_ms)
        forget_counts(r.id)
        redis.call('DEL', list .. ':group')
      else
        redis.call('RPUSH', target, message)
        if died_suspects[list] and l.died then groups[list] = math.ceil(died_suspects[list] / 2) end
      end
    else
      dead_letter(list, message, 'unreadable when handed back', now)
    end
    redis.call('ZREM', 'warmq:leases', l.id)
    redis.call('HDEL', 'warmq:worker:' .. worker, l.id)
  end
  for list, size in pairs(groups) do redis.call('SET', list .. ':group', size) end
end
