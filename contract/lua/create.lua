-- CREATE: make the batch if it does not exist, else tell what it is.
-- ARGV: batch, digest seed, deadline in ms ('' for none, `+n` counts from now), then field,
--   value pairs
-- Touches: warmq:batch:<id>, warmq:batches
-- Returns: {created 0|1, created_at}; {-1} if a delete left results behind: finish it first
local key = batch_key(ARGV[1])
local found = redis.call('HGET', key, 'created_at')
if found then return { 0, found } end
if redis.call('EXISTS', key .. ':index') == 1 then return { -1 } end
local now = now_ms()
local fields = { 'created_at', now, 'cursor', 0, 'digest', ARGV[2], 'total', 0, 'valid', 0 }
for i = 4, #ARGV do fields[#fields + 1] = ARGV[i] end
if ARGV[3] ~= '' then
  local from = string.sub(ARGV[3], 1, 1) == '+' and now or 0
  fields[#fields + 1] = 'deadline'
  fields[#fields + 1] = from + tonumber(ARGV[3])
end
redis.call('HSET', key, unpack(fields))
redis.call('ZADD', 'warmq:batches', now, ARGV[1])
return { 1, tostring(now) }
