-- IDEMPOTENT_END: renew, finish or forget a try of a POST with an Idempotency-Key.
-- ARGV: name, token of this try, action ('renew', 'forget', 'done'); for renew also: lease in ms; for done
--   also: ms to remember and, if the answer is stored: status, headers (JSON), body
-- Touches: warmq:gateway:idempotent:<name>
-- Returns: 1; 0 if another try has the name
allow_when_full()
local key = 'warmq:gateway:idempotent:' .. ARGV[1]
if redis.call('HGET', key, 'token') ~= ARGV[2] then return 0 end
if ARGV[3] == 'renew' then
  redis.call('HSET', key, 'until', now_ms() + tonumber(ARGV[4]))
elseif ARGV[3] == 'forget' then
  redis.call('DEL', key)
else
  redis.call('HSET', key, 'token', '')
  if ARGV[5] then
    redis.call('HSET', key, 'status', ARGV[5], 'headers', ARGV[6], 'body', ARGV[7])
  end
  redis.call('PEXPIRE', key, ARGV[4])
end
return 1
