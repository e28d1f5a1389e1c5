-- DUE_CLAIM: claim due work with a lease. The work is due again when its lease expires. If Redis's clock has
-- stepped back since the last call, due times are moved back with it.
-- ARGV: kind of work, lease in ms, most entries to claim, longest wait of this kind in ms ('' for no limit):
--   work that would be due later is claimed now
-- Touches: warmq:gateway:due:<kind>, warmq:gateway:due:<kind>:held, warmq:{lease_seq,sweep}
-- Returns: {now in ms, id, token, id, token, ...}
allow_when_full()
local kind, lease_ms, most, longest = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local due, now = 'warmq:gateway:due:' .. kind, now_ms()
-- Most due times that one call moves; ms between two notes of the time; steps of the clock up to STEP_MS are ignored.
local AT_ONCE, NOTED_MS, STEP_MS = 1000, 1000, 500

-- Stored between calls: the time of the last call, by how much due times are still to be moved, and the first
-- of these times.
local noted = redis.call('HGET', 'warmq:sweep', 'due:' .. kind) or ''
local last, by, from = string.match(noted, '^(%d+) (%d+) (%d+)$')
last, by, from = tonumber(last or now), tonumber(by or 0), tonumber(from or 0)
if last - now > STEP_MS then by, from = last - now, now + 1 end
local moving = by > 0
if moving then
  -- In ascending order, so that moved times are lower than those still to be moved.
  local found = redis.call('ZRANGEBYSCORE', due, from, '+inf', 'WITHSCORES', 'LIMIT', 0, AT_ONCE)
  for i = 1, #found, 2 do
    redis.call('ZADD', due, found[i + 1] - by, found[i])
    from = tonumber(found[i + 1])
  end
  if #found < 2 * AT_ONCE then by, from = 0, 0 end
end
if noted == '' or now - last >= NOTED_MS or moving then
  redis.call('HSET', 'warmq:sweep', 'due:' .. kind, string.format('%.0f %.0f %.0f', now, by, from))
end

local ids = redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, most)
if longest and #ids < most then
  local beyond = redis.call('ZRANGEBYSCORE', due, '(' .. now + longest, '+inf', 'LIMIT', 0, most - #ids)
  for _, id in ipairs(beyond) do ids[#ids + 1] = id end
end
local out = { now }
for _, id in ipairs(ids) do
  local token = string.format('%d', redis.call('INCR', 'warmq:lease_seq'))
  redis.call('ZADD', due, now + lease_ms, id)
  redis.call('HSET', due .. ':held', id, token)
  out[#out + 1], out[#out + 2] = id, token
end
return out
