-- IDEMPOTENT_BEGIN: begin a try of a POST with an Idempotency-Key, unless an earlier try runs or has ended.
-- ARGV: name (digest of caller, path and key), fingerprint of the content ('' if not known yet),
--   token of this try, lease in ms, ms to remember
-- Touches: warmq:gateway:idempotent:<name>
-- Returns: {'new'}: this try runs; {'running', ms until the other try's lease ends}; {'other'}: the
--   content differs; {'done', status, headers, body}; {'done'} if the answer was not stored, or the
--   content is not known yet
allow_when_full()
local key, fingerprint, token, now = 'warmq:gateway:idempotent:' .. ARGV[1], ARGV[2], ARGV[3], now_ms()
-- What the last try has written; its token is '' once it is done.
local last_fingerprint, last_token, last_until, status, headers, body = unpack(
  redis.call('HMGET', key, 'fingerprint', 'token', 'until', 'status', 'headers', 'body'))
if last_fingerprint and last_fingerprint ~= '' and fingerprint ~= '' and last_fingerprint ~= fingerprint then
  return { 'other' }
end
if last_token and last_token ~= '' and last_token ~= token and tonumber(last_until) > now then
  local left, lease = tonumber(last_until) - now, tonumber(ARGV[4])
  if left > lease then -- Redis's clock has stepped back
    left = lease
    redis.call('HSET', key, 'until', now + left)
  end
  return { 'running', left }
end
if last_token == '' then
  if status and fingerprint ~= '' then return { 'done', status, headers, body } end
  return { 'done' }
end
if fingerprint == '' and last_fingerprint then fingerprint = last_fingerprint end
redis.call('HSET', key, 'fingerprint', fingerprint, 'token', token, 'until', now + tonumber(ARGV[4]))
redis.call('PEXPIRE', key, ARGV[5])
return { 'new' }
