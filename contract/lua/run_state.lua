-- RUN_STATE: read a run's record and the windows that it does not count yet. A record has the field `windows`, the
-- number of windows that it counts; window n of the run is the batch `<run>.<n>`, and Redis has at most two.
-- ARGV: run
-- Touches: warmq:batch:<id>
-- Returns: {{field, value, ...} of the record, of the first window, of the second}; an empty list for a missing one
local key = batch_key(ARGV[1])
local first = tonumber(redis.call('HGET', key, 'windows') or 0)
local found = { redis.call('HGETALL', key) }
for n = first, first + 1 do
  found[#found + 1] = redis.call('HGETALL', string.format('%s.%d', key, n))
end
return found
