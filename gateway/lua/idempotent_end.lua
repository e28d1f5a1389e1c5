-- IDEMPOTENT_END: renew, finish or forget a try of a POST with an Idempotency-Key.
-- ARGV: name, token of this try, action ('renew', 'forget', 'done'); for renew also: lease in ms; for done
--   also: ms to remember and, if the answer is stored: status, headers (JSON), body
-- Touches: warmq:gateway:idempotent:<name>
-- Returns: 1; 0 if another try has the name
allow_when_full()
local key, token, action = 'warmq:gateway:idempotent:' .. ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', key, 'token') ~= token then return 0 end
if action == 'renew' then
  redis.call('HSET', key, 'until', now_ms() + tonumber(ARGV[4]))
elseif action == 'forget' then
  redis.call('DEL', key)
else
  redis.call('HSET', key, 'token', '')
  local remember_ms, status, headers, body = unpack(ARGV, 4, 7)
  if status then redis.call('HSET', key, 'status', status, 'headers', headers, 'body', body) end
  redis.call('PEXPIRE', key, remember_ms)
end
return 1
