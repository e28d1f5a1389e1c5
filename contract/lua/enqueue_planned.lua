-- ENQUEUE_PLANNED: append messages of a batch whose lines ENQUEUE has only announced, if they are
-- those the batch waits for: in its plan's order, which every submit of the file computes alike.
-- ARGV: batch, life, list key, cursor, digest (both of the whole file's end), plan, position before,
--   high water count, high water fraction, messages joined by newlines (as in ENQUEUE)
-- Touches: warmq:batch:<id>, the list key, warmq:turns:*
-- Returns: {'ok'} | {'gone'} | {'sealed'} | {'moved', cursor, digest} | {'full', text}
--   | {'at', position} | {'plan', plan}: the batch has got messages up to there, by that plan
local batch, life, list = ARGV[1], ARGV[2], ARGV[3]
local key = batch_key(batch)
local messages = 0
local function push(found)
  redis.call('LPUSH', list, unpack(found))
  messages = messages + #found
end
if not batch_alive(batch, life) then return { 'gone' } end
local state = redis.call('HMGET', key, 'sealed', 'cursor', 'digest', 'cancelling', 'planned', 'plan',
                         'announced')
-- Sealed with all its messages: by another submit of the file.
if state[4] or state[1] and state[5] ~= state[7] then return { 'sealed' } end
if state[2] ~= ARGV[4] or state[3] ~= ARGV[5] then return { 'moved', state[2], state[3] } end
if state[6] and state[6] ~= ARGV[6] then return { 'plan', state[6] } end
if state[5] ~= ARGV[7] then return { 'at', state[5] or '' } end
local memory = redis.call('INFO', 'memory')
local used = tonumber(string.match(memory, 'used_memory:(%d+)'))
local limit = tonumber(string.match(memory, 'maxmemory:(%d+)'))
if limit > 0 and used > limit * tonumber(ARGV[9]) then
  return { 'full', string.format('Redis uses %d of %d bytes', used, limit) }
end
if limit == 0 and waiting_beside(list) >= tonumber(ARGV[8]) then
  return { 'full', string.format('%d requests wait in the queue', waiting_beside(list)) }
end
unblock() -- the caller's mark decides what is too much
local found, at = {}, 1
join(list) -- first: a user that may not do that must not have pushed anything
while at <= #ARGV[10] do
  local stop = string.find(ARGV[10], '\n', at, true) or #ARGV[10] + 1
  found[#found + 1] = string.sub(ARGV[10], at, stop - 1)
  if #found == 1000 then -- unpack() overflows Lua's stack at 8000 values
    push(found)
    found = {}
  end
  at = stop + 1
end
if #found > 0 then push(found) end
note_pushed(list, messages)
redis.call('HSET', key, 'plan', ARGV[6])
redis.call('HINCRBY', key, 'planned', messages)
if #ARGV[10] > 1024 * 1024 then collectgarbage() end -- else its copies stay in Lua's memory
return { 'ok' }
