-- SWEEP: return the messages of expired leases to the queue.
-- If the last sweep was more than a third of a lease ago (Redis was down, paused or failed over, or no worker
-- swept), SWEEP returns no lease for lease_ms, so that living workers renew theirs first.
-- SWEEP counts a death for a worker's oldest leases only, as many as its engine has slots: requests enter an
-- engine in the order of their leases, so no other request was inside. SWEEP counts no death if the worker has
-- renewed another lease: the worker lives, and lost the reply of the POP that took the expired ones.
-- SWEEP also writes the calling worker's announcement; removes announcements after a minute, the entries of gone
-- batches and of their dead letters, and expired dead letters and revocations; gives turns again to tenants whose
-- cap is no longer reached; and ends charges that belong to no lease.
-- ARGV: lease_ms, max_deaths, ttl_ms, date, most leases to return, worker, announcement (JSON), queue
-- Touches: warmq:{sweep,workers,batches,revoked,dead}, and what RELEASE touches
-- Returns: how many leases were returned; -1 while it waits for renewals.
local lease_ms, max_deaths, ttl_ms, date = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local limit, now = tonumber(ARGV[5]), now_ms()
allow_when_full()
local announced = redis.call('HGETALL', 'warmq:workers')
for i = 1, #announced, 2 do
  local at = tonumber(string.match(announced[i + 1], '^(%d+)'))
  -- A time in the future was written before Redis's clock stepped back.
  if at and math.abs(now - at) > 60000 then redis.call('HDEL', 'warmq:workers', announced[i]) end
end
redis.call('HSET', 'warmq:workers', ARGV[6], now .. '\0' .. ARGV[7])
for _, batch in ipairs(redis.call('ZRANDMEMBER', 'warmq:batches', 20)) do
  if redis.call('EXISTS', batch_key(batch)) == 0 then
    redis.call('ZREM', 'warmq:batches', batch)
    redis.call('UNLINK', batch_key(batch) .. ':columns') -- 0.2.0 gives it no expiry
  else
    note_missed_webhook(batch) -- RETIRE does it too, but a worker of 0.2.0 may have retired the batch
  end
end
-- pack_letter (leases.lua) makes the records of dead letters.
local letters = redis.call('HRANDFIELD', 'warmq:dead', 20, 'WITHVALUES')
for i = 1, #letters, 2 do
  local at, batch, life = string.match(letters[i + 1], '^(%d+)%z%d+%z%Z*%z%Z*%z(%Z*)%z(%Z*)%z')
  local gone = batch and batch ~= '' and not batch_alive(batch, life)
  if gone or batch == '' and now - tonumber(at) > ttl_ms then forget_letter(letters[i]) end
end
redis.call('ZREMRANGEBYSCORE', 'warmq:revoked', '-inf', math.floor(now / 1000))
end_leftover_charges()
for _, capped in ipairs(redis.call('SRANDMEMBER', turns_key(ARGV[8]) .. ':capped', 100)) do
  local tenant = string.match(capped, '^%d\6(.*)$') or ''
  if cap_left_of(ARGV[8], tenant) > 0 then uncap(ARGV[8], tenant) end
end

local state = redis.call('HMGET', 'warmq:sweep', 'last', 'hold')
local last, hold = tonumber(state[1] or 0), tonumber(state[2] or 0)
local stepped = last - now > lease_ms / 3
if stepped then
  -- Redis's clock has stepped back. Leases from before the step keep the time that they had left. Those leases
  -- expire nearer to the old time than to the new one.
  for _, lease in ipairs(redis.call('ZRANGEBYSCORE', LEASES, (now + last) / 2, '+inf')) do
    redis.call('ZINCRBY', LEASES, now - last, lease)
  end
end
if now - last > lease_ms / 3 or stepped then hold = now + lease_ms end
redis.call('HSET', 'warmq:sweep', 'last', now, 'hold', hold)
if hold > now then return -1 end

-- Returns the leases of a worker, expired or not, the newest first; and whether the worker lives.
local function leases_of(worker)
  local all, alive = {}, false
  local ids = redis.call('HKEYS', worker_key(worker))
  local ends = ask_many('ZMSCORE', LEASES, ids)
  for n, id in ipairs(ids) do
    local expiry = tonumber(ends[n] or 0)
    if expiry >= 0 then
      all[#all + 1] = { id = id, seq = lease_number(id), expired = expiry <= now }
      alive = alive or expiry > now + lease_ms / 2
    end
  end
  table.sort(all, function(a, b) return a.seq > b.seq end)
  return all, alive
end

-- Hands back a worker's expired leases, the newest first; returns their number. The function hands back at
-- most `most` leases, and leaves the rest to later calls. But if one of them counts a death, all leases that count
-- a death are handed back: their number decides how many suspects run together next.
local function sweep_worker(worker, most)
  local back, outside, died = {}, {}, false
  local all, alive = leases_of(worker)
  for i, lease in ipairs(all) do
    local record = redis.call('HGET', worker_key(worker), lease.id)
    if lease.expired and #back >= most and not died then break end
    local leased = unpack_lease(record)
    leased.lease, leased.record, leased.died = lease.id, record, not alive and #all - i < leased.slots
    if lease.expired then
      back[#back + 1] = leased
      died = died or leased.died
    elseif not leased.died then
      outside[#outside + 1] = leased
    end
  end
  -- Afterwards the unexpired leases are the worker's oldest. The records of those that were not inside the engine
  -- get 0 slots, so that later calls count no death for them.
  for _, leased in ipairs(died and outside or {}) do
    redis.call('HSET', worker_key(worker), leased.lease, (string.gsub(leased.record, '^%d+', '0')))
  end
  hand_back(worker, back, max_deaths, now, date, ttl_ms, true)
  return #back
end

local workers, count = {}, 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, 0, now, 'LIMIT', 0, limit)) do
  local worker = string.match(id, '^(.*)/%d+$')
  if worker and redis.call('HEXISTS', worker_key(worker), id) == 1 then
    workers[worker] = true
  else
    redis.call('ZREM', LEASES, id)
  end
end
for worker in pairs(workers) do
  if count < limit then count = count + sweep_worker(worker, limit - count) end
end
apply_to_batches(now)
apply_charges()
move_back()
return count
