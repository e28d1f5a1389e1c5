-- ENQUEUE: append one chunk of a batch, if it is the chunk the batch waits for.
-- ARGV: batch, life, list key, cursor before, digest before, cursor after, digest after,
--   index chunk, high water count, high water fraction, messages joined by newlines (JSON has
--   none; one argument costs the producer a tenth of 500), then pairs (request id, meta) of
--   rejected lines
-- Touches: warmq:batch:<id>, its :index and :finished, the list key, warmq:turns:*,
--   celery-task-meta-<id>
-- Returns: {'ok'} | {'gone'} | {'sealed'} | {'moved', cursor, digest} | {'full', text}
local batch, life, list = ARGV[1], ARGV[2], ARGV[3]
local key = batch_key(batch)
if not batch_alive(batch, life) then return { 'gone' } end
local state = redis.call('HMGET', key, 'sealed', 'cursor', 'digest', 'cancelling')
if state[1] or state[4] then return { 'sealed' } end
if state[2] ~= ARGV[4] or state[3] ~= ARGV[5] then return { 'moved', state[2], state[3] } end
local memory = redis.call('INFO', 'memory')
local used = tonumber(string.match(memory, 'used_memory:(%d+)'))
local limit = tonumber(string.match(memory, 'maxmemory:(%d+)'))
if limit > 0 and used > limit * tonumber(ARGV[10]) then
  return { 'full', string.format('Redis uses %d of %d bytes', used, limit) }
end
local function waiting()
  if is_kombus(list) then return redis.call('LLEN', list) end
  return tonumber(redis.call('HGET', turns_key((place_of(list))), 'waiting') or 0)
end
if limit == 0 and waiting() >= tonumber(ARGV[9]) then
  return { 'full', string.format('%d requests wait in the queue', waiting()) }
end
unblock() -- the caller's mark decides what is too much
local messages, found, at = 0, {}, 1
local function push()
  redis.call('LPUSH', list, unpack(found))
  messages, found = messages + #found, {}
end
while at <= #ARGV[11] do
  local stop = string.find(ARGV[11], '\n', at, true) or #ARGV[11] + 1
  found[#found + 1] = string.sub(ARGV[11], at, stop - 1)
  if #found == 1000 then push() end -- unpack() overflows Lua's stack at 8000 values
  at = stop + 1
end
if #found > 0 then push() end
note_pushed(list, messages)
redis.call('RPUSH', key .. ':index', ARGV[8])
redis.call('HSET', key, 'cursor', ARGV[6], 'digest', ARGV[7])
redis.call('HINCRBY', key, 'total', messages + (#ARGV - 11) / 2)
redis.call('HINCRBY', key, 'valid', messages)
for i = 12, #ARGV, 2 do
  commit(ARGV[i], ARGV[i + 1], 'failed', batch, life, 0, 0, 0)
end
apply_to_batches(now_ms())
if #ARGV[11] > 1024 * 1024 then collectgarbage() end -- else its copies stay in Lua's memory
return { 'ok' }
