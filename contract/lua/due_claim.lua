-- DUE_CLAIM: take work whose time has come; it is leased, and comes back if nobody renews it.
-- ARGV: kind of work, lease in ms, most
-- Touches: warmq:gateway:due:<kind>, warmq:gateway:due:<kind>:held, warmq:lease_seq
-- Returns: {now in ms, id, token, id, token, ...}
local due, now = 'warmq:gateway:due:' .. ARGV[1], now_ms()
local out = { now }
for _, id in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, tonumber(ARGV[3]))) do
  local token = string.format('%d', redis.call('INCR', 'warmq:lease_seq'))
  redis.call('ZADD', due, now + tonumber(ARGV[2]), id)
  redis.call('HSET', due .. ':held', id, token)
  out[#out + 1], out[#out + 2] = id, token
end
return out
