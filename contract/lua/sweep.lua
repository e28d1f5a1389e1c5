-- SWEEP: put expired leases back, counted. After a gap between sweeps longer than
-- a third of the lease (Redis was down, paused, failed over, or nobody swept) it
-- waits one whole lease, so that living workers renew first.
-- Only the oldest `slots` leases of a worker can have been inside its engine
-- (engines admit in order), so only those count a death.
-- It also announces the worker that sweeps, forgets those silent for a minute, and
-- batches whose keys have expired.
-- ARGV: lease_ms, max_deaths, ttl_ms, date, limit, worker, announcement (JSON)
-- Touches: warmq:{sweep,workers,batches} and what RELEASE touches
-- Returns: how many leases were put back; -1 while holding.
local lease_ms, max_deaths, ttl_ms, date = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local limit, now = tonumber(ARGV[5]), now_ms()
unblock()
local announced = redis.call('HGETALL', 'warmq:workers')
for i = 1, #announced, 2 do
  local at = tonumber(string.match(announced[i + 1], '^(%d+)'))
  if at and now - at > 60000 then redis.call('HDEL', 'warmq:workers', announced[i]) end
end
redis.call('HSET', 'warmq:workers', ARGV[6], now .. '\0' .. ARGV[7])
for _, batch in ipairs(redis.call('ZRANDMEMBER', 'warmq:batches', 20)) do
  if redis.call('EXISTS', batch_key(batch)) == 0 then redis.call('ZREM', 'warmq:batches', batch) end
end
local state = redis.call('HMGET', 'warmq:sweep', 'last', 'hold')
local hold = tonumber(state[2] or 0)
if not state[1] or now - tonumber(state[1]) > lease_ms / 3 then hold = now + lease_ms end
redis.call('HSET', 'warmq:sweep', 'last', now, 'hold', hold)
if hold > now then return -1 end

-- Every lease of a worker, the newest first: the rank of a lease is its place among
-- all of them, whenever they expire.
local function leases_of(hash)
  local all = {}
  for _, id in ipairs(redis.call('HKEYS', hash)) do
    local expiry = redis.call('ZSCORE', 'warmq:leases', id)
    all[#all + 1] = { id = id, seq = tonumber(string.match(id, '/(%d+)$')) or 0,
                      expired = not expiry or tonumber(expiry) <= now }
  end
  table.sort(all, function(a, b) return a.seq > b.seq end)
  return all
end

local function sweep_worker(worker, room)
  local hash = 'warmq:worker:' .. worker
  local back, left, died = {}, {}, false
  local all = leases_of(hash)
  for _, l in ipairs(all) do
    l.record = redis.call('HGET', hash, l.id)
    local _, list = split_record(l.record)
    -- Suspects go back together: the last of them, on its own, would be taken for the culprit.
    if list == suspects_of(list) then room = #all end
  end
  -- The newest first, also across calls: so the oldest ends at the head of its list.
  for i, l in ipairs(all) do
    l.died = #all - i < split_record(l.record)
    if l.expired and #back < room then
      back[#back + 1] = l
      died = died or l.died
    elseif not l.died then
      left[#left + 1] = l
    end
  end
  -- What was not in the engine keeps that mark when the ones before it are gone.
  for _, l in ipairs(died and left or {}) do
    local _, list, message = split_record(l.record)
    redis.call('HSET', hash, l.id, '0\0' .. list .. '\0' .. message)
  end
  hand_back(worker, back, max_deaths, now, date, ttl_ms)
  return #back
end

local workers, count = {}, 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', 'warmq:leases', '-inf', now, 'LIMIT', 0, limit)) do
  local worker = string.match(id, '^(.*)/%d+$')
  if worker and redis.call('HEXISTS', 'warmq:worker:' .. worker, id) == 1 then
    workers[worker] = true
  else
    redis.call('ZREM', 'warmq:leases', id)
  end
end
for worker in pairs(workers) do
  if count < limit then count = count + sweep_worker(worker, limit - count) end
end
complete_touched(now)
return count
