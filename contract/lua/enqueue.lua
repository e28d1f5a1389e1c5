-- ENQUEUE: append one chunk of a batch's lines, if it is the next one.
-- ARGV: batch, life, list key (several: joined by newlines), cursor before, digest before, cursor after, digest
--   after, index chunk, most waiting messages, most fraction of maxmemory (why_full), messages, kept columns of the
--   lines (greatest line, line feed, bytes; '' without any), then pairs (request id, meta) of rejected lines
--   messages: joined by newlines, which JSON does not have. As 500 arguments they would cost the producer ten times
--   as much. With several lists, an empty line ends the messages of each. In a planned batch `=` and the number
--   of messages that ENQUEUE_PLANNED will append.
--   index chunk: with --dedupe, an entry with a fourth value is a follower's, and that value is its leader's
--   request id. The leader may have ended already.
-- Touches: the list keys, turns, endings
-- Returns: {'ok'} | {'gone'} | {'sealed'} | {'moved', cursor, digest} of the batch | {'full', reason}

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

local batch, life, list = ARGV[1], ARGV[2], ARGV[3]
local key = batch_key(batch)
if not batch_alive(batch, life) then return { 'gone' } end
local sealed, cursor, digest, cancelling, queues =
  unpack(redis.call('HMGET', key, 'sealed', 'cursor', 'digest', 'cancelling', 'queues'))
if sealed or cancelling then return { 'sealed' } end
if cursor ~= ARGV[4] or digest ~= ARGV[5] then return { 'moved', cursor, digest } end
local full = why_full(list, tonumber(ARGV[9]), tonumber(ARGV[10]))
if full then return { 'full', full } end
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
redis.call('HINCRBY', key, 'total', messages + followers + (#ARGV - 12) / 2)
redis.call('HINCRBY', key, 'valid', messages + followers)
for i = 13, #ARGV, 2 do
  commit(ARGV[i], ARGV[i + 1], 'failed', batch, life, 0, 0, 0)
end
apply_to_batches(now_ms())
if #ARGV[11] + #ARGV[12] > 1024 * 1024 then collectgarbage() end -- else its copies stay in Lua's memory
return { 'ok' }
