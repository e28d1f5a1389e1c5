-- PARTIAL_ORDER: read the order in which the requests of a batch ended, in all of its queue batches. If Redis takes
-- writes, the requests that have ended since the last call are appended first. The order is stored as segments:
-- runs of endings of one queue batch.
-- ARGV: batch, position from which segments are wanted, ttl_ms, its queue batches...
-- Touches: warmq:gateway:partial:<batch>, warmq:batch:<id>:finished
-- Returns: {end of the order, then for each segment, at most 500 of them: its first position, queue batch
--   (index from 0), the index of its first ending in that queue batch, number of endings}
local MOST = 500
local writes = may_write()
local key, wanted = 'warmq:gateway:partial:' .. ARGV[1], tonumber(ARGV[2])
local segments, last = unpack(redis.call('HMGET', key, 'segments', 'end'))
segments, last = tonumber(segments or 0), tonumber(last or 0)

local function segment(n)
  local first, part, from, count = string.match(redis.call('HGET', key, n) or '', '^(%d+) (%d+) (%d+) (%d+)$')
  return tonumber(first), tonumber(part), tonumber(from), tonumber(count)
end

local parts_to_read = writes and #ARGV - 3 or 0
for part = 0, parts_to_read - 1 do
  local seen = tonumber(redis.call('HGET', key, 'seen:' .. part) or 0)
  local count = redis.call('LLEN', batch_key(ARGV[part + 4]) .. ':finished') - seen
  if count > 0 then
    local first, previous, from, before = segment(segments)
    if previous == part then
      count = count + before
    else
      segments, first, from = segments + 1, last, seen
    end
    redis.call('HSET', key, segments, string.format('%d %d %d %d', first, part, from, count),
               'seen:' .. part, from + count)
    last = first + count
  end
end
local out = { last }
if segments == 0 then return out end
if writes then
  redis.call('HSET', key, 'segments', segments, 'end', last)
  redis.call('PEXPIRE', key, ARGV[3])
end
-- Find the last segment that begins at or before the wanted position, or else the first one.
local begin, behind = 1, segments + 1
while behind - begin > 1 do
  local middle = math.floor((begin + behind) / 2)
  if segment(middle) <= wanted then begin = middle else behind = middle end
end
for n = begin, math.min(segments, begin + MOST - 1) do
  local first, part, from, count = segment(n)
  for _, number in ipairs({ first, part, from, count }) do out[#out + 1] = number end
end
return out
