-- CREATE: make the batch if it does not exist, else tell what it is.
-- ARGV: batch, random text, digest seed, deadline in ms ('' for none, `+n` counts from now), then field,
--   value pairs
-- Touches: warmq:batch:<id>, warmq:{batches,lease_seq}
-- Returns: {created 0|1}; {-1} if a delete left results behind: finish it first
-- A batch that is created sealed is only ended: that works where Redis is full, too.
for i = 5, #ARGV, 2 do
  if ARGV[i] == 'sealed' then unblock() end
end
local key = batch_key(ARGV[1])
if redis.call('HEXISTS', key, 'deleting') == 1 then return { -1 } end
if redis.call('EXISTS', key) == 1 then return { 0 } end
-- An interrupted delete leaves an index alone.
if redis.call('EXISTS', key .. ':index') == 1 then return { -1 } end
local now = now_ms()
-- A repeated CREATE after a delete makes another batch.
local life = ARGV[2] .. '.' .. string.format('%d', redis.call('INCR', 'warmq:lease_seq'))
local fields = { 'created_at', now, 'life', life, 'v', PROTOCOL, 'cursor', 0, 'digest', ARGV[3],
                 'total', 0, 'valid', 0 }
for i = 5, #ARGV do fields[#fields + 1] = ARGV[i] end
if ARGV[4] ~= '' then
  local from = string.sub(ARGV[4], 1, 1) == '+' and now or 0
  fields[#fields + 1] = 'deadline'
  fields[#fields + 1] = from + tonumber(ARGV[4])
end
redis.call('HSET', key, unpack(fields))
redis.call('ZADD', 'warmq:batches', now, ARGV[1])
return { 1 }
