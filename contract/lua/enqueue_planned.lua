-- ENQUEUE_PLANNED: append messages of a batch whose lines ENQUEUE has only announced. They are appended if they are
-- the next ones in the order of the batch's plan; every submit of the same file computes the same order.
-- ARGV: batch, life, list key (as in ENQUEUE), cursor and digest of the end of the whole file, plan, number of
--   messages that the batch must have before, most waiting messages, most fraction of maxmemory (why_full),
--   messages joined by newlines (as in ENQUEUE)
-- Touches: warmq:batch:<id>, the list keys, turns
-- Returns: {'ok', 'stopped' or ''} (as ENQUEUE) | {'gone'} | {'sealed'} | {'moved', cursor, digest} of the batch | {'full', reason}
--   | {'at', number of messages that the batch has} | {'plan', the plan by which it got them}
local batch, life, list = ARGV[1], ARGV[2], ARGV[3]
local key = batch_key(batch)
if not batch_alive(batch, life) then return { 'gone' } end
local sealed, cursor, digest, cancelling, stopped, planned, plan, announced, queues = unpack(redis.call(
  'HMGET', key, 'sealed', 'cursor', 'digest', 'cancelling', 'stopped', 'planned', 'plan', 'announced', 'queues'))
-- A batch is sealed before all its messages are queued only if it was cancelled or its deadline has passed.
if cancelling and stopped ~= 'open' or sealed and planned ~= announced then return { 'sealed' } end
if cursor ~= ARGV[4] or digest ~= ARGV[5] then return { 'moved', cursor, digest } end
if plan and plan ~= ARGV[6] then return { 'plan', plan } end
if planned ~= ARGV[7] then return { 'at', planned or '' } end
local full = why_full(list, tonumber(ARGV[8]), tonumber(ARGV[9]))
if full then return { 'full', full } end
allow_when_full() -- the caller's high-water mark is the limit
local messages = push_lines(list, ARGV[10], key, queues)
redis.call('HSET', key, 'plan', ARGV[6], 'lines_at', now_ms())
redis.call('HINCRBY', key, 'planned', messages)
if #ARGV[10] > 1024 * 1024 then collectgarbage() end -- else its copies stay in Lua's memory
return { 'ok', cancelling and 'stopped' or '' }
