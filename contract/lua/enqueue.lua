-- ENQUEUE: append one chunk of a batch's lines, if it is the next one.
-- ARGV: batch, life, list key (several: joined by newlines), cursor before, digest before, cursor after, digest
--   after, index chunk, most waiting messages, most fraction of maxmemory (why_full), messages, kept columns of the
--   lines (greatest line, line feed, bytes; '' without any), known answers, then pairs (request id, meta) of
--   rejected lines
--   messages: joined by newlines, which JSON does not have. As 500 arguments they would cost the producer ten times
--   as much. With several lists, an empty line ends the messages of each. In a planned batch `=` and the number
--   of messages that ENQUEUE_PLANNED will append.
--   known answers: '' or, joined by newlines, the time (ISO 8601) before which an answer is too old ('-': none is),
--   and for each line that a known answer answers: its request id, the id of the request with the answer, the
--   digest that the answer must have, the line's number, its custom_id as JSON
--   index chunk: with --dedupe, an entry with a fourth value is a follower's, and that value is its leader's
--   request id. The leader may have ended already.
-- Touches: the list keys, turns, endings, the results that are known answers, warmq:batch:<id> of their batches,
--   warmq:reused
-- Returns: {'ok', 'stopped' or ''}; in a batch that was `stopped` the requests end as cancelled | {'gone'}
--   | {'sealed'} | {'moved', cursor, digest} of the batch | {'full', reason}
--   | {'unknown', request ids joined by spaces}: nothing was appended, because the answers of these requests are gone

-- Returns the outcome of a request of a batch; nil while it has no result.
local function outcome_of(batch, id)
  local status = result_status(id)
  if status == '' or is_foreign_result(id, batch_state(batch)) then return nil end
  if string.find(status, '{"status":"SUCCESS"', 1, true) then return 'completed' end
  if status == FAILURE then return 'failed' end
  -- A revoked request's error code is its outcome. Quotes within a JSON string are escaped, so a match is the
  -- code.
  local expired = string.find(redis.call('GET', RESULT .. id), '"code":"expired"', 1, true)
  return expired and 'expired' or 'cancelled'
end

-- Adds the followers of a chunk; returns their number. Followers of a leader that has ended end at once.
local function add_followers(batch, chunk)
  local state = batch_state(batch)
  if not state.dedupe then return 0 end
  -- The numbers of each leader's first and last follower in this chunk.
  local key, count, first, last = followers_key(batch), 0, {}, {}
  for _, entry in ipairs(cjson.decode(chunk)[3]) do
    local leader = entry[4]
    if leader then
      local n = redis.call('HINCRBY', key, leader, 1)
      redis.call('HSET', key, leader .. '\0' .. string.format('%d', n),
                 cjson.encode({ entry[1], entry[2], entry[3] }))
      first[leader], last[leader] = first[leader] or n, n
      count = count + 1
    end
  end
  for leader, from in pairs(first) do
    local outcome = outcome_of(batch, leader)
    if outcome then
      local lines = last[leader] - from + 1
      add(state, outcome, lines)
      if outcome == 'failed' then note_failure(state, leader, redis.call('GET', RESULT .. leader), lines) end
      state.ended[#state.ended + 1] = ended_followers(leader, from, last[leader])
    end
  end
  add(state, 'identical', count)
  return count
end

-- The text between body and `warmq` in a success (contract/results.py). Quotes within a JSON string are escaped, so
-- no string can match, and the last match is the meta's own.
local AFTER_BODY = ',"traceback":null,"children":[],"date_done":"'
local AFTER_PATTERN = '^,"traceback":null,"children":%[%],"date_done":"([^"]*)","task_id":"([^"]*)",' ..
  '"warmq":{"batch":"([^"\\]*)","custom_id":.-,"line":%d+,"error":null,(.*)}}$'
-- Most bytes that follow a body: a custom_id and the beginning of a prompt, both short.
local MOST_AFTER = 8192

local tenants = {} -- of the batches with known answers
local function tenant_of(batch)
  if not tenants[batch] then tenants[batch] = redis.call('HGET', batch_key(batch), 'tenant') or '' end
  return tenants[batch]
end

-- Returns of a known answer: the result up to its body, nil if it is long; how many bytes follow; when it was computed;
-- what its `warmq` has after `error`, with the request that computed it. Returns nothing if the result is gone, is
-- not the answer with this digest, is being deleted, or is another tenant's: request ids are those of a deleted
-- batch if a batch gets its id.
local function read_known(id, digest, tenant)
  local tail = redis.call('GETRANGE', RESULT .. id, -MOST_AFTER, -1)
  local at, found = nil, string.find(tail, AFTER_BODY, 1, true)
  while found do at, found = found, string.find(tail, AFTER_BODY, found + 1, true) end
  if not at then return nil end
  local date, ran, batch, rest = string.match(tail, AFTER_PATTERN, at)
  if not date or string.match(rest, '"known":"(%x+)"') ~= digest then return nil end
  if not batch_state(batch).life or tenant_of(batch) ~= tenant then return nil end
  if not string.find(rest, ',"reused":true,', 1, true) then
    rest = rest .. ',"reused":true,"answered_by":"' .. ran .. '"'
  end
  return #tail < MOST_AFTER and string.sub(tail, 1, at - 1) or nil, #tail - at + 1, date, rest
end

-- Returns the lines with known answers, and the ids of those whose answers are gone or too old. An entry has the
-- line's id, the id of the answer, and its own result; if that is long, only its end, and how many bytes of the
-- other result it replaces.
local function read_known_lines(batch, text)
  local known, unknown = {}, {}
  local since, lines = string.match(text, '^([^\n]*)\n(.*)$')
  local prefix, tenant = '","warmq":{"batch":' .. cjson.encode(batch) .. ',"custom_id":', tenant_of(batch)
  for id, old, digest, line, custom_id in
    string.gmatch(lines or '', '([^ \n]+) ([^ \n]+) (%x+) (%d+) ([^\n]+)') do
    local head, cut, date, rest = read_known(old, digest, tenant)
    if cut and (since == '-' or date >= since) then
      known[#known + 1] = { id = id, old = old, cut = not head and cut, text = (head or '') .. AFTER_BODY .. date ..
        '","task_id":"' .. id .. prefix .. custom_id .. ',"line":' .. line .. ',"error":null,' .. rest .. '}}' }
    else
      unknown[#unknown + 1] = id
    end
  end
  return known, unknown
end

-- Writes the results of the lines with known answers; returns the bytes of these results.
local function answer_known(known, batch, life)
  local bytes, state = 0, batch_state(batch)
  for _, one in ipairs(known) do
    local meta = one.text
    if one.cut then
      local old = redis.call('GET', RESULT .. one.old)
      meta = string.sub(old, 1, #old - one.cut) .. meta
    end
    if commit(one.id, meta, 'completed', batch, life, 0, 0, 0) then add(state, 'cached', 1) end
    bytes = bytes + #meta
  end
  if #known > 0 then
    redis.call('HINCRBY', 'warmq:reused', tenant_of(batch), #known)
  end
  return bytes
end

local batch, life, list = ARGV[1], ARGV[2], ARGV[3]
local key = batch_key(batch)
if not batch_alive(batch, life) then return { 'gone' } end
local sealed, cursor, digest, cancelling, stopped, queues =
  unpack(redis.call('HMGET', key, 'sealed', 'cursor', 'digest', 'cancelling', 'stopped', 'queues'))
if sealed or cancelling and stopped ~= 'open' then return { 'sealed' } end
if cursor ~= ARGV[4] or digest ~= ARGV[5] then return { 'moved', cursor, digest } end
local full = why_full(list, tonumber(ARGV[9]), tonumber(ARGV[10]))
if full then return { 'full', full } end
local known, unknown = read_known_lines(batch, ARGV[13])
if #unknown > 0 then return { 'unknown', table.concat(unknown, ' ') } end
allow_when_full() -- the caller's high-water mark is the limit
local messages = tonumber(string.match(ARGV[11], '^=(%d+)$'))
if messages then
  redis.call('HINCRBY', key, 'announced', messages)
else
  messages = push_lines(list, ARGV[11], key, queues)
end
local followers = add_followers(batch, ARGV[8])
redis.call('RPUSH', key .. ':index', ARGV[8])
redis.call('HSET', key, 'cursor', ARGV[6], 'digest', ARGV[7], 'lines_at', now_ms())
if ARGV[12] ~= '' then
  redis.call('ZADD', key .. ':columns', tonumber(string.match(ARGV[12], '^(%d+)\n')), ARGV[12])
end
redis.call('HINCRBY', key, 'total', messages + followers + #known + (#ARGV - 13) / 2)
redis.call('HINCRBY', key, 'valid', messages + followers + #known)
local copied = answer_known(known, batch, life)
for i = 14, #ARGV, 2 do
  commit(ARGV[i], ARGV[i + 1], 'failed', batch, life, 0, 0, 0)
end
apply_to_batches(now_ms())
if #ARGV[11] + #ARGV[12] + copied > 1024 * 1024 then collectgarbage() end -- else its copies stay in Lua's memory
return { 'ok', cancelling and 'stopped' or '' }
