-- ENQUEUE: append one chunk of a batch, if it is the chunk the batch waits for.
-- ARGV: batch, life, list key, cursor before, digest before, cursor after, digest after,
--   index chunk, high water count, high water fraction, messages joined by newlines (JSON has
--   none; one argument costs the producer a tenth of 500), or `=` and how many ENQUEUE_PLANNED will
--   bring, then pairs (request id, meta) of rejected lines
--   Where the batch was submitted with --dedupe, an entry of the chunk with a fourth part is a
--   follower's: the result of the request named there answers it, before or after it ended.
-- Touches: warmq:batch:<id>, its :index, :finished and :identical, the list key, warmq:turns:*,
--   celery-task-meta-<id>
-- Returns: {'ok'} | {'gone'} | {'sealed'} | {'moved', cursor, digest} | {'full', text}

-- The outcome of a request of a batch; nil while it has no result.
local function outcome_of(batch, id)
  local status = result_status(id)
  if status == '' or foreign(id, batch_state(batch)) then return nil end
  if string.find(status, '{"status":"SUCCESS"', 1, true) then return 'completed' end
  if status == FAILURE then return 'failed' end
  -- Only the code of a revoked request, which the meta has but once unescaped, gives its outcome.
  local expired = string.find(redis.call('GET', RESULT .. id), '"code":"expired"', 1, true)
  return expired and 'expired' or 'cancelled'
end

-- Notes the followers of a chunk, ended where their leader has; returns their number.
local function add_followers(batch, chunk)
  local state = batch_state(batch)
  if not state.dedupe then return 0 end
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
      add(state, outcome, last[leader] - from + 1)
      state.ended[#state.ended + 1] = ended_followers(leader, from, last[leader])
    end
  end
  add(state, 'identical', count)
  return count
end

local batch, life, list = ARGV[1], ARGV[2], ARGV[3]
local key = batch_key(batch)
if not batch_alive(batch, life) then return { 'gone' } end
local state = redis.call('HMGET', key, 'sealed', 'cursor', 'digest', 'cancelling')
if state[1] or state[4] then return { 'sealed' } end
if state[2] ~= ARGV[4] or state[3] ~= ARGV[5] then return { 'moved', state[2], state[3] } end
local full = why_full(list, tonumber(ARGV[9]), tonumber(ARGV[10]))
if full then return { 'full', full } end
unblock() -- the caller's high-water mark is the limit
local messages = tonumber(string.match(ARGV[11], '^=(%d+)$'))
if messages then
  redis.call('HINCRBY', key, 'announced', messages)
else
  messages = push_lines(list, ARGV[11])
end
local followers = add_followers(batch, ARGV[8])
redis.call('RPUSH', key .. ':index', ARGV[8])
redis.call('HSET', key, 'cursor', ARGV[6], 'digest', ARGV[7])
redis.call('HINCRBY', key, 'total', messages + followers + (#ARGV - 11) / 2)
redis.call('HINCRBY', key, 'valid', messages + followers)
for i = 12, #ARGV, 2 do
  commit(ARGV[i], ARGV[i + 1], 'failed', batch, life, 0, 0, 0)
end
apply_to_batches(now_ms())
if #ARGV[11] > 1024 * 1024 then collectgarbage() end -- else its copies stay in Lua's memory
return { 'ok' }
