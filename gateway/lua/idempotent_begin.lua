-- IDEMPOTENT_BEGIN: begin a try of a POST with an Idempotency-Key, unless an earlier try runs or has ended.
-- ARGV: name (digest of caller, path and key), fingerprint of the content ('' if not known yet),
--   token of this try, lease in ms, ms to remember
-- Touches: warmq:gateway:idempotent:<name>
-- Returns: {'new'}: this try runs; {'running', ms until the other try's lease ends}; {'other'}: the
--   content differs; {'done', status, headers, body}; {'done'} if the answer was not stored, or the
--   content is not known yet
allow_when_full()
local key, fingerprint, token, now = 'warmq:gateway:idempotent:' .. ARGV[1], ARGV[2], ARGV[3], now_ms()
local was = redis.call('HMGET', key, 'fingerprint', 'token', 'until', 'status', 'headers', 'body')
if was[1] and was[1] ~= '' and fingerprint ~= '' and was[1] ~= fingerprint then return { 'other' } end
if was[2] and was[2] ~= '' and was[2] ~= token and tonumber(was[3]) > now then
  local left, lease = tonumber(was[3]) - now, tonumber(ARGV[4])
  if left > lease then -- Redis's clock has stepped back
    left = lease
    redis.call('HSET', key, 'until', now + left)
  end
  return { 'running', left }
end
if was[2] == '' then
  if was[4] and fingerprint ~= '' then return { 'done', was[4], was[5], was[6] } end
  return { 'done' }
end
if fingerprint == '' and was[1] then fingerprint = was[1] end
redis.call('HSET', key, 'fingerprint', fingerprint, 'token', token, 'until', now + tonumber(ARGV[4]))
redis.call('PEXPIRE', key, ARGV[5])
return { 'new' }
