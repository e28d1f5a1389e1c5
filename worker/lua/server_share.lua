-- SERVER SHARE: renew a worker's lease on a server that several workers share with its other clients; return how
-- many requests it may have in flight there. One worker, the leader, measures the server and publishes the limit of
-- them all; those with requests get even shares. A worker that does not renew its lease has no share.
--
-- key                         | type | fields
-- warmq:server:<address>      | HASH | leader: a worker; limit: requests in flight of all workers; shown: what the
--                             |      | leader has measured (JSON); finished: requests answered to all workers;
--                             |      | of:<worker>: <end of its lease in ms> <share> <in flight> <waiting>
-- warmq:server:<address>:kept | HASH | quiet:<model>: <ms> <what the server shows without our requests>;
--                             |      | day: <days since 1970> <tokens written>; for 7 days
--
-- ARGV: address, worker, lease_ms (0: the worker leaves), 1 if it can measure the server, its requests in flight,
--   its waiting requests, requests answered since its last call, tokens written since then, limit ('' unless it
--   leads), shown, model, quiet values ('' without new ones)
-- Touches: warmq:server:<address>, warmq:server:<address>:kept
-- Returns: {1 if the worker leads, limit or -1, its share, other workers, requests that these may have in flight,
--   finished, tokens written today (UTC), shown, quiet values}
allow_when_full()
local address, worker, lease_ms, can_lead = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local in_flight, waiting = tonumber(ARGV[5]), tonumber(ARGV[6])
local answered, tokens = tonumber(ARGV[7]), tonumber(ARGV[8])
local limit, shown, model, quiet = ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local DAY_MS, KEPT_MS = 86400000, 7 * 86400000
-- What cannot be divided evenly goes to another worker after this time.
local TURN_MS = 10000
local key, now = 'warmq:server:' .. address, now_ms()
local kept = key .. ':kept'

local today = math.floor(now / DAY_MS)
local day, before = string.match(redis.call('HGET', kept, 'day') or '', '^(%d+) (%d+)$')
if tonumber(day) == today then before = tonumber(before) else before = 0 end
local written = before + tokens
if tokens > 0 then
  redis.call('HSET', kept, 'day', string.format('%d %.0f', today, written))
  redis.call('PEXPIRE', kept, KEPT_MS)
end

local leader = redis.call('HGET', key, 'leader')
if lease_ms == 0 then
  redis.call('HDEL', key, 'of:' .. worker)
  if leader == worker then redis.call('HDEL', key, 'leader') end
  return {}
end

-- The other workers whose leases go on, by name.
local peers, count = {}, 0
local fields = redis.call('HGETALL', key)
for at = 1, #fields, 2 do
  local name = string.match(fields[at], '^of:(.*)$')
  if name and name ~= worker then
    local ends, share, running, waits = string.match(fields[at + 1], '^(%d+) (%d+) (%d+) (%d+)$')
    ends = tonumber(ends)
    -- An end later than a lease's means that Redis's clock has stepped back.
    if not ends or ends <= now or ends > now + lease_ms then
      redis.call('HDEL', key, fields[at])
    else
      count = count + 1
      peers[name] = { share = tonumber(share), running = tonumber(running), waits = tonumber(waits) }
    end
  end
end

if leader == worker and not can_lead then
  redis.call('HDEL', key, 'leader')
  leader = false
elseif can_lead and leader ~= worker and not (leader and peers[leader]) then
  redis.call('HSET', key, 'leader', worker)
  leader = worker
end
if leader == worker and limit ~= '' then
  redis.call('HSET', key, 'limit', limit, 'shown', shown)
end
limit = tonumber(redis.call('HGET', key, 'limit') or '-1')

-- `used`: what the other workers have or may start. A share shrinks at once, but its requests end later; nobody gets
-- their places before.
local wanting, used, busy = { worker }, 0, 0
for name, one in pairs(peers) do
  local may_start = one.waits > 0 and one.share or 0
  busy = busy + math.max(one.running, may_start)
  if one.running + one.waits > 0 then
    wanting[#wanting + 1] = name
    used = used + math.max(one.running, one.share)
  end
end
local share = 0
if in_flight + waiting == 0 and count > 0 then
  share = math.max(0, math.min(1, limit)) -- enough to begin
elseif limit > 0 then
  table.sort(wanting)
  local place = 0
  for n, name in ipairs(wanting) do
    if name == worker then place = n end
  end
  local turn = (place + math.floor(now / TURN_MS)) % #wanting
  local even = math.floor(limit / #wanting) + (turn < limit % #wanting and 1 or 0)
  share = math.max(0, math.min(even, limit - used))
end
local record = string.format('%.0f %d %d %d', now + lease_ms, share, in_flight, waiting)
redis.call('HSET', key, 'of:' .. worker, record)
local finished = redis.call('HINCRBY', key, 'finished', answered)
redis.call('PEXPIRE', key, lease_ms)

local field = 'quiet:' .. model
if quiet ~= '' then
  redis.call('HSET', kept, field, string.format('%.0f ', now) .. quiet)
  redis.call('PEXPIRE', kept, KEPT_MS)
else
  local at, values = string.match(redis.call('HGET', kept, field) or '', '^(%d+) (.*)$')
  quiet = at and now - tonumber(at) < KEPT_MS and values or ''
end
return {
  leader == worker and 1 or 0, limit, share, count, busy, finished, written,
  redis.call('HGET', key, 'shown') or '', quiet,
}
