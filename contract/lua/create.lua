-- CREATE: make a batch unless it exists.
-- ARGV: batch, random text, first digest, deadline in ms ('' for none; `+n` counts from now), then pairs
--   (field, value) of the batch's hash
-- Touches: warmq:batch:<id>, its :columns and :index, warmq:{batches,lease_seq}
-- Returns: {1}; {0} if the batch exists; {-1} if an interrupted delete must be finished first
-- A batch that is created sealed has no requests; it can be created while Redis is full.
local of_run = false
for i = 5, #ARGV, 2 do
  if ARGV[i] == 'sealed' then allow_when_full() end
  if ARGV[i] == 'run' then of_run = true end
end
local key = batch_key(ARGV[1])
if redis.call('HEXISTS', key, 'deleting') == 1 then return { -1 } end
if redis.call('EXISTS', key) == 1 then return { 0 } end
-- An interrupted delete may leave an index without a batch.
if redis.call('EXISTS', key .. ':index') == 1 then return { -1 } end
local now = now_ms()
-- The number makes the life differ from that of a deleted batch even if a client repeats its random text.
local life = ARGV[2] .. '.' .. string.format('%d', redis.call('INCR', 'warmq:lease_seq'))
local fields = { 'created_at', now, 'lines_at', now, 'life', life, 'v', PROTOCOL, 'cursor', 0, 'digest', ARGV[3],
                 'total', 0, 'valid', 0 }
for i = 5, #ARGV do fields[#fields + 1] = ARGV[i] end
if ARGV[4] ~= '' then
  local from = string.sub(ARGV[4], 1, 1) == '+' and now or 0
  fields[#fields + 1] = 'deadline'
  fields[#fields + 1] = from + tonumber(ARGV[4])
end
redis.call('UNLINK', key .. ':columns') -- 0.2.0 leaves it behind when it deletes a batch
redis.call('HSET', key, unpack(fields))
-- The record of a run stands for its windows in lists.
if not of_run then redis.call('ZADD', 'warmq:batches', now, ARGV[1]) end
return { 1 }
