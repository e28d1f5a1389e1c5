-- DUE_RELEASE: end a claim. The work is due again after some time; now if it was scheduled during the claim.
-- ARGV: kind of work, id, token of the claim, ms from now
-- Touches: warmq:gateway:due:<kind>, warmq:gateway:due:<kind>:held
-- Returns: 1; 0 if the claim has ended already: nothing is written
allow_when_full()
local due, id = 'warmq:gateway:due:' .. ARGV[1], ARGV[2]
if redis.call('HGET', due .. ':held', id) ~= ARGV[3] then return 0 end
local wait = tonumber(ARGV[4])
if redis.call('HEXISTS', due .. ':held', id .. '\0again') == 1 then wait = 0 end
redis.call('HDEL', due .. ':held', id, id .. '\0again')
redis.call('ZADD', due, now_ms() + wait, id)
return 1
