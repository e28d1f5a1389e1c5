-- REVOKE: record requests that a Celery client has revoked, so that POP ends them, in whichever queue they wait.
-- ARGV: seconds for which they are recorded, request ids...
-- Touches: warmq:revoked
-- Returns: nothing
allow_when_full()
local until_s = math.floor(now_ms() / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', 'warmq:revoked', until_s, ARGV[i]) end
