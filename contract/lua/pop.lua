-- POP: lease up to k messages, and look at no more than max_bytes of them (but at one).
-- Peeks, writes leases and dead letters, then trims,
-- so that an error anywhere loses nothing.
-- ARGV: worker, queue, k, max_bytes, lease_ms, slots, ttl_ms, date, floor, list keys...
--   floor is the highest lease number this worker knows: a Redis that lost its last
--   writes must not give a number twice, or one request's DONE would drop another's lease
-- Touches: the list keys, warmq:{lease_seq,leases,dead,returns,deaths,revoked},
--   warmq:worker:<worker>, warmq:batch:<id>*, celery-task-meta-<id>
-- Returns: {now_ms, suspects, group, more, then for each lease: id, returns, deaths, message}
local worker, queue, k = ARGV[1], ARGV[2], tonumber(ARGV[3])
local max_bytes, lease_ms, slots = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local ttl_ms, date = tonumber(ARGV[7]), ARGV[8]
local EXAMINE = 1000 -- messages looked at in one call, dropped ones included
local now = now_ms()
unblock()
if tonumber(redis.call('GET', 'warmq:lease_seq') or 0) < tonumber(ARGV[9]) then
  redis.call('SET', 'warmq:lease_seq', ARGV[9])
end
local batches, out = {}, {}
local leased, examined, bytes = 0, 0, 0
local any_returns = redis.call('EXISTS', 'warmq:returns') == 1
local any_revoked = redis.call('EXISTS', 'warmq:revoked') == 1
local worker_hash = 'warmq:worker:' .. worker

local function batch_state(r)
  local state = batches[r.batch]
  if not state then
    state = redis.call('HMGET', batch_key(r.batch), 'created_at', 'cancelling')
    batches[r.batch] = state
  end
  return state
end

-- Ends a message that must not run; returns true if it did.
local function dispose(list, message, r)
  local result = result_status(r.id)
  local in_batch = r.batch ~= ''
  if in_batch and batch_state(r)[1] ~= r.created then return true end
  if result ~= '' then
    if in_batch and result == REVOKED then keep_message(r.batch, r.id, list, message) end
    return true
  end
  local code, text
  if in_batch and batch_state(r)[2] or any_revoked and redis.call('ZSCORE', 'warmq:revoked', r.id) then
    code, text = 'cancelled', 'cancelled by the user'
  elseif r.deadline and r.deadline * 1000 < now then
    code, text = 'expired', 'not started before its deadline'
  else
    return false
  end
  if in_batch then keep_message(r.batch, r.id, list, message) end
  commit_ending(r, revoked_meta(r, code, text, date), code, ttl_ms)
  return true
end

local function lease(list, message, r)
  local id = worker .. '/' .. redis.call('INCR', 'warmq:lease_seq')
  redis.call('HSET', worker_hash, id, slots .. '\0' .. list .. '\0' .. message)
  redis.call('ZADD', 'warmq:leases', now + lease_ms, id)
  local returns, deaths = '0', '0'
  if any_returns then
    returns = redis.call('HGET', 'warmq:returns', r.id) or '0'
    deaths = redis.call('HGET', 'warmq:deaths', r.id) or '0'
  end
  local n = #out
  out[n + 1], out[n + 2], out[n + 3], out[n + 4] = id, returns, deaths, message
  leased = leased + 1
end

local full = k <= 0
for i = 10, #ARGV do
  local list, taken = ARGV[i], 0
  while not full do
    -- One at a time: a range of the list could be gigabytes.
    local message = redis.call('LINDEX', list, -(taken + 1))
    if not message then break end
    if examined > 0 and bytes + #message > max_bytes or examined >= EXAMINE then full = true break end
    local r, reason = read_message(message)
    local readable, disposed = r and true, nil
    -- An id that names a key of another type must not stop the queue.
    if r then readable, disposed = pcall(dispose, list, message, r) end
    if not readable then
      dead_letter(list, message, reason or 'its ids name keys that are something else', now)
    elseif not disposed then
      lease(list, message, r)
    elseif any_returns then
      forget_counts(r.id)
    end
    taken = taken + 1
    examined = examined + 1
    bytes = bytes + #message
    if leased >= k then full = true end
  end
  if taken > 0 then redis.call('LTRIM', list, 0, -(taken + 1)) end
  if full then break end
end
complete_touched(now)
local suspects = suspects_of(queue)
local head = { now, redis.call('LLEN', suspects), redis.call('GET', suspects .. ':group') or '0', full and 1 or 0 }
for i = 1, #out do head[4 + i] = out[i] end
return head
