-- Reads Celery protocol-2 messages. A message may be megabytes, nearly all of it the body, which no script
-- needs: only the part after the body is decoded.

-- Returns whether a text is UTF-8. Clients could not read a result with any other text.
local CONTINUATION = '[\128-\191]'
local function is_utf8(text)
  if not string.find(text, '[\128-\255]') then return true end
  for _, sequence in ipairs({
    '[\194-\223]', '\224[\160-\191]', '[\225-\236\238\239]' .. CONTINUATION, '\237[\128-\159]',
    '\240[\144-\191]' .. CONTINUATION, '[\241-\243]' .. CONTINUATION .. CONTINUATION,
    '\244[\128-\143]' .. CONTINUATION,
  }) do
    text = string.gsub(text, sequence .. CONTINUATION, '?')
  end
  return not string.find(text, '[\128-\255]')
end

-- Returns the position of the body's closing quote; nil if the body is not the message's first field. kombu and
-- `producer` write it first. A quote after an even number of backslashes (byte 92) is not escaped.
local function body_end(message)
  local at = select(2, string.find(message, '^{"body":%s?"'))
  while at do
    at = string.find(message, '",', at + 1, true)
    if at then
      local before = at - 1
      while string.byte(message, before) == 92 do before = before - 1 end
      if (at - 1 - before) % 2 == 0 then
        return string.find(message, '^",%s?"content%-', at) and at
      end
    end
  end
end

-- Returns the suffix that the name of the list of a priority has.
local function suffix_of(priority)
  for _, step in ipairs({ 9, 6, 3 }) do
    if priority and priority >= step then return '\6\22' .. step end
  end
  return ''
end

-- Returns the number of sequences of a request; 1 if `count` is not a number of 1 to MOST_SEQUENCES.
local MOST_SEQUENCES = 100000
local function sequences_of(count)
  local usable = type(count) == 'number' and count >= 1 and count <= MOST_SEQUENCES
  return usable and math.floor(count) or 1
end

local function usable_id(id)
  return #id > 0 and #id <= 255 and not string.find(id, '%c') and is_utf8(id)
end

-- What contract/message.py writes after the body: constant text (HEAD, TAIL), the fields of one message (OWN),
-- and the fields that all messages of its batch have (COMMON). Matching this form takes POP a fifth less time
-- than decoding JSON; a message in any other form is decoded.
local HEAD = '","content-encoding":"utf-8","content-type":"application/json","headers":{"lang":"py",' ..
  '"task":"warmq.generate","argsrepr":"","kwargsrepr":"","origin":"warmq","eta":null,' ..
  '"expires":null,"group":null,"parent_id":null,"retries":0,"timelimit":[null,null],"id":"'
local function pattern_of(text) return (string.gsub(text, 'TEXT', '[^"\\%%c]+')) end
local OWN = pattern_of(
  '^(TEXT)","root_id":"TEXT","warmq":{"line":(%d+),"url":"TEXT","custom_id":"(TEXT)()",')
local COMMON = pattern_of(
  '^","batch":"(TEXT)","created":"%d+","life":"(TEXT)","deadline":([%w.]+),"v":1}},' ..
  '"properties":{"delivery_mode":2,"priority":(%d+),"delivery_info":{"exchange":"",' ..
  '"routing_key":"TEXT()"')
local TAIL = '"},"body_encoding":"utf-8","reply_to":"","correlation_id":"'

local function read_common(message, from)
  local batch, life, deadline, priority, stop = string.match(message, COMMON, from)
  if not batch then return nil end
  if deadline ~= 'null' and not string.find(deadline, '^%d+%.?%d*$') then return nil end
  return { text = string.sub(message, from, stop - 1), batch = batch, life = life,
           deadline = tonumber(deadline), suffix = suffix_of(tonumber(priority)) }
end

-- The common fields of the message that was read last; the next one is usually of the same batch.
local common
-- Reads a message in the form of contract/message.py; returns nil for any other.
local function read_written(message, stop)
  if string.find(message, HEAD, stop, true) ~= stop then return nil end
  local id, line, custom_id, at = string.match(message, OWN, stop + #HEAD)
  if not id or not usable_id(id) or not is_utf8(custom_id) then return nil end
  if not common or string.find(message, common.text, at, true) ~= at then
    common = read_common(message, at)
    if not common then return nil end
  end
  local tail = TAIL .. id .. '","delivery_tag":"' .. id .. '"}}'
  at = at + #common.text
  if #message ~= at + #tail - 1 or string.find(message, tail, at, true) ~= at then return nil end
  return { id = id, batch = common.batch, life = common.life, custom_id = custom_id,
           line = tonumber(line), deadline = common.deadline, suffix = common.suffix, ignored = false,
           sequences = 1 }
end

-- Returns what read_message returns for a message without a usable id in its headers: nil, a reason and, if a
-- client waits for an answer, a request with the id that the client uses. Messages of Celery's task protocol 1
-- have their ids in the body and in correlation_id.
local LONGEST_ID = 65536 -- bytes of a correlation_id that is answered
local function no_id(headers, properties)
  local id = headers['id']
  local why = 'headers.id is not a usable task id: it has more than 255 bytes, or control characters'
  if id == nil and type(properties) == 'table' then
    id = properties['correlation_id']
    why = "headers.id is missing, as in Celery's task protocol 1: leave task_protocol at 2"
  end
  local has_client = type(id) == 'string' and #id > 0 and #id <= LONGEST_ID and is_utf8(id) and
                     type(headers['warmq']) ~= 'table' and headers['ignore_result'] ~= true
  if not has_client then return nil, why end
  return nil, why, { id = id, batch = '', life = '', custom_id = cjson.null, line = cjson.null }
end

-- Returns the request of a Celery protocol-2 message, with the fields that scripts need. `suffix` is that of
-- its priority's list; only an online request has `tenant` and `keep_ms`.
-- Returns a request and a reason if warmq 0.1.0 or a newer warmq wrote the message: its fields may mean
-- something else. Returns nil and a reason for any other message; if a client waits for its answer, also a
-- request with the task id of that answer.
local function read_message(message)
  local stop = body_end(message)
  local written = stop and read_written(message, stop)
  if written then return written end
  local ok, decoded = pcall(cjson.decode, stop and '{"body":"' .. string.sub(message, stop) or message)
  if not ok or type(decoded) ~= 'table' then return nil, 'not a JSON object' end
  local headers = decoded['headers']
  if type(headers) ~= 'table' then return nil, 'no headers: not a Celery protocol-2 message' end
  if type(headers['id']) ~= 'string' or not usable_id(headers['id']) then
    return no_id(headers, decoded['properties'])
  end
  if type(decoded['body']) ~= 'string' or type(decoded['properties']) ~= 'table' then
    return nil, 'no body or no properties'
  end
  local out = { id = headers['id'], batch = '', life = '', custom_id = cjson.null, line = cjson.null,
                sequences = 1 }
  out.ignored = headers['ignore_result'] == true
  out.suffix = suffix_of(tonumber(decoded['properties']['priority']))
  local ours = headers['warmq']
  if type(ours) == 'table' then
    if type(ours['batch']) == 'string' and ours['batch'] ~= '' then
      if ours['life'] == nil and type(ours['created']) == 'string' then
        return out, 'queued by warmq 0.1.0 (protocol 1), which this worker does not read: submit it again'
      end
      -- A message without a batch's life belongs to no living batch.
      out.batch, out.life = ours['batch'], type(ours['life']) == 'string' and ours['life'] or ''
    end
    local custom_id = ours['custom_id']
    if type(custom_id) == 'string' and is_utf8(custom_id) then out.custom_id = custom_id end
    if type(ours['line']) == 'number' then out.line = ours['line'] end
    if type(ours['deadline']) == 'number' then out.deadline = ours['deadline'] end
    if type(ours['tenant']) == 'string' and usable_id(ours['tenant']) then out.tenant = ours['tenant'] end
    out.sequences = sequences_of(ours['sequences'])
    if type(ours['keep_ms']) == 'number' then out.keep_ms = ours['keep_ms'] end
    if type(ours['v']) == 'number' and ours['v'] > PROTOCOL then
      return out, string.format('queued by a newer warmq (protocol %.0f, this worker knows %d): ' ..
                                'upgrade the workers, then retry it', ours['v'], PROTOCOL)
    end
  end
  return out
end

-- Returns the message of a request that runs again, without a deadline before `now` (ms). The message is
-- changed as text, because cjson would turn its empty lists into {}. The pattern matches only the field:
-- quotes within a JSON string are escaped.
local DEADLINE = '("deadline":%s*)(%-?%d[%d.eE+-]*)'
local function without_past_deadline(message, now)
  local stop = body_end(message) or 1
  local rest = string.sub(message, stop)
  local _, deadline = string.match(rest, DEADLINE)
  if not deadline or (tonumber(deadline) or 0) * 1000 > now then return message end
  return string.sub(message, 1, stop - 1) .. string.gsub(rest, DEADLINE, '%1null')
end

-- Returns a message of a batch as one that is queued now: workers measure the time in the queue from `created`.
local CREATED = '("created":")%d+(","life":")'
local function queued_now(message, now)
  local stop = body_end(message) or 1
  local rest = string.gsub(string.sub(message, stop), CREATED, string.format('%%1%.0f%%2', now), 1)
  return string.sub(message, 1, stop - 1) .. rest
end

-- Returns a message without Celery's `expires`: a date as text, which Redis's Lua has no function to read.
local EXPIRES = '("expires":%s*)"[^"\\]*"'
local function without_expires(message)
  local stop = body_end(message) or 1
  return string.sub(message, 1, stop - 1) .. string.gsub(string.sub(message, stop), EXPIRES, '%1null')
end

-- Returns Celery's meta for the ending of a request that no worker ran to its end. cjson encodes the strings
-- only: it would turn empty lists into {}.
local function ending_meta(request, exc_type, code, text, date)
  local encode, revoked = cjson.encode, exc_type == 'TaskRevokedError'
  local batch = request.batch == '' and 'null' or encode(request.batch)
  return '{"status":"' .. (revoked and 'REVOKED' or 'FAILURE') .. '","result":{"exc_type":"' ..
    exc_type .. '","exc_message":[' .. encode(text) .. '],"exc_module":' ..
    (revoked and '"celery.exceptions"' or 'null') ..
    '},"traceback":null,"children":[],"date_done":' .. encode(date) .. ',"task_id":' .. encode(request.id) ..
    ',"warmq":{"batch":' .. batch .. ',"custom_id":' .. encode(request.custom_id) ..
    ',"line":' .. (type(request.line) == 'number' and string.format('%d', request.line) or 'null') ..
    ',"error":{"code":"' .. code .. '","message":' .. encode(text) .. '}}}'
end
