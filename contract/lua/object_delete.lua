-- OBJECT_DELETE: remove one of the gateways' objects.
-- ARGV: kind, id, owner
-- Touches: warmq:gateway:<kind>:<id>, warmq:gateway:<kind>s:<owner>
-- Returns: 1 if it was there and the owner's, else 0
local key = 'warmq:gateway:' .. ARGV[1] .. ':' .. ARGV[2]
redis.call('ZREM', 'warmq:gateway:' .. ARGV[1] .. 's:' .. ARGV[3], ARGV[2])
if redis.call('HGET', key, 'owner') ~= ARGV[3] then return 0 end
return redis.call('DEL', key)
