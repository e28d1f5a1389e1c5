-- OBJECT_DELETE: remove one of the gateways' objects.
-- ARGV: kind, id, owner
-- Touches: warmq:gateway:<kind>:<id>, warmq:gateway:<kind>s:<owner>, warmq:gateway:records,
--   warmq:gateway:records:<owner>
-- Returns: 1 if it was there and the owner's, else 0
unblock()
local key = 'warmq:gateway:' .. ARGV[1] .. ':' .. ARGV[2]
redis.call('ZREM', 'warmq:gateway:' .. ARGV[1] .. 's:' .. ARGV[3], ARGV[2])
if redis.call('HGET', key, 'owner') ~= ARGV[3] then return 0 end
count_record(ARGV[3], ARGV[1] .. ':' .. ARGV[2], 0)
return redis.call('DEL', key)
