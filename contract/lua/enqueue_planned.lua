-- ENQUEUE_PLANNED: append messages of a batch whose lines ENQUEUE has only announced, if they are those the
-- batch waits for: in its plan's order, which every submit of the file computes alike.
-- ARGV: batch, life, list key, cursor, digest (both of the whole file's end), plan, position before,
--   high water count, high water fraction, messages joined by newlines (as in ENQUEUE)
-- Touches: warmq:batch:<id>, the list key, warmq:turns:*
-- Returns: {'ok'} | {'gone'} | {'sealed'} | {'moved', cursor, digest} | {'full', text}
--   | {'at', position} | {'plan', plan}: the batch has got messages up to there, by that plan
local batch, life, list = ARGV[1], ARGV[2], ARGV[3]
local key = batch_key(batch)
if not batch_alive(batch, life) then return { 'gone' } end
local state = redis.call('HMGET', key, 'sealed', 'cursor', 'digest', 'cancelling', 'planned', 'plan',
                         'announced')
-- Sealed with all its messages: by another submit of the file.
if state[4] or state[1] and state[5] ~= state[7] then return { 'sealed' } end
if state[2] ~= ARGV[4] or state[3] ~= ARGV[5] then return { 'moved', state[2], state[3] } end
if state[6] and state[6] ~= ARGV[6] then return { 'plan', state[6] } end
if state[5] ~= ARGV[7] then return { 'at', state[5] or '' } end
local full = why_full(list, tonumber(ARGV[8]), tonumber(ARGV[9]))
if full then return { 'full', full } end
unblock() -- the caller's high-water mark is the limit
local messages = push_lines(list, ARGV[10])
redis.call('HSET', key, 'plan', ARGV[6])
redis.call('HINCRBY', key, 'planned', messages)
if #ARGV[10] > 1024 * 1024 then collectgarbage() end -- else its copies stay in Lua's memory
return { 'ok' }
