-- Reads Celery protocol-2 messages. A message may be megabytes, nearly all of it the body, which no script
-- needs: only the part after the body is decoded.

-- Whether a text is UTF-8: any other cannot be written into a result that a client reads.
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

-- The position of the body's closing quote in a message as kombu and `producer` write it, body first; nil
-- in any other. An unescaped quote stands behind an even number of backslashes.
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

-- The suffix of the list of a priority.
local function step_of(priority)
  for _, step in ipairs({ 9, 6, 3 }) do
    if priority and priority >= step then return '\6\22' .. step end
  end
  return ''
end

-- The number of sequences that a message asks for.
local MOST_SEQUENCES = 100000
local function sequences_of(count)
  local usable = type(count) == 'number' and count >= 1 and count <= MOST_SEQUENCES
  return usable and math.floor(count) or 1
end

local function usable_id(id)
  return #id > 0 and #id <= 255 and not string.find(id, '%c') and is_utf8(id)
end

-- The part after the body as contract/message.py writes it, whole: texts that are the same in all messages,
-- fields of one message, and fields common to its batch, which are read once for each run of them. POP
-- takes a fifth less time so than when it decodes (docs/explanation/performance.md, "versus"); a message that differs
-- in anything is decoded.
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
           deadline = tonumber(deadline), step = step_of(tonumber(priority)) }
end

local common -- of the message that was read last
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
           line = tonumber(line), deadline = common.deadline, step = common.step, ignored = false,
           sequences = 1 }
end

-- Reads a message without a usable id, such as all of Celery's task protocol 1, in which the ids are in the
-- body and in correlation_id.
local LONGEST_ANSWERED = 65536
local function no_id(headers, properties)
  local id = headers['id']
  local why = 'headers.id is not a usable task id: it has more than 255 bytes, or control characters'
  if id == nil and type(properties) == 'table' then
    id = properties['correlation_id']
    why = "headers.id is missing, as in Celery's task protocol 1: leave task_protocol at 2"
  end
  local waits = type(id) == 'string' and #id > 0 and #id <= LONGEST_ANSWERED and is_utf8(id) and
                type(headers['warmq']) ~= 'table' and headers['ignore_result'] ~= true
  if not waits then return nil, why end
  return nil, why, { id = id, batch = '', life = '', custom_id = cjson.null, line = cjson.null }
end

-- The fields of a Celery protocol-2 message that warmq needs; nil and the reason if it is not one. `step`
-- is the suffix of the priority's list; only requests without a batch, from a gateway, have `tenant` and
-- `keep_ms`. A reason with a request: 0.1.0 wrote it, or a newer warmq, whose meaning this one may
-- not know. The third value, of an unreadable message: the task id at which its client waits for an answer.
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
  out.step = step_of(tonumber(decoded['properties']['priority']))
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

-- Lifts a past deadline from a request that is run again, `now` in ms. The message is changed as text:
-- cjson would turn its empty lists into {}. Within a string the quotes would be escaped, so these patterns
-- match nothing but the fields.
local DEADLINE = '("deadline":%s*)(%-?%d[%d.eE+-]*)'
local function without_past_deadline(message, now)
  local stop = body_end(message) or 1
  local rest = string.sub(message, stop)
  local _, deadline = string.match(rest, DEADLINE)
  if not deadline or (tonumber(deadline) or 0) * 1000 > now then return message end
  return string.sub(message, 1, stop - 1) .. string.gsub(rest, DEADLINE, '%1null')
end

-- Lifts Celery's `expires`, which Lua cannot read.
local EXPIRES = '("expires":%s*)"[^"\\]*"'
local function without_expires(message)
  local stop = body_end(message) or 1
  return string.sub(message, 1, stop - 1) .. string.gsub(string.sub(message, stop), EXPIRES, '%1null')
end

-- Celery's meta for an ending that no worker computed. Strings only through cjson: it never reads a result
-- body, whose empty lists it would turn into {}.
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
