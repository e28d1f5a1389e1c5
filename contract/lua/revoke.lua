-- REVOKE: record Celery's revocations, so that POP ends these requests wherever they wait.
-- ARGV: seconds to remember them, request ids...
-- Touches: warmq:revoked
-- Returns: nothing
unblock()
local until_s = math.floor(now_ms() / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', 'warmq:revoked', until_s, ARGV[i]) end
