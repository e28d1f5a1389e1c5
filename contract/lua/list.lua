-- LIST: read the ids of all batches, newest first, and the fields of the newest.
-- ARGV: number of batches whose fields are wanted
-- Touches: warmq:batches, warmq:batch:<id>
-- Returns: {{batch id, ...}, {{field, value, ...} of each of the newest, empty if the batch has expired}}
local ids, states = redis.call('ZREVRANGE', 'warmq:batches', 0, -1), {}
for i = 1, math.min(#ids, tonumber(ARGV[1])) do
  states[i] = redis.call('HGETALL', batch_key(ids[i]))
end
return { ids, states }
