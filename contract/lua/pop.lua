-- POP: lease up to k messages; it looks at no more than max_bytes of them, but at least at one.
-- The leases are written at the end, also after an error, so that it loses nothing.
-- ARGV: worker, queue, k, max_bytes, lease_ms, slots, ttl_ms, date, floor, list keys...
--   floor is the highest lease number this worker knows: a Redis that lost its last
--   writes must not give a number twice, or one request's DONE would drop another's lease
-- Touches: the list keys, warmq:{lease_seq,leases,dead,returns,deaths,revoked}, warmq:dead:<n>,
--   warmq:worker:<worker>, warmq:leased:<lease>, warmq:batch:<id>*, celery-task-meta-<id>
-- Returns: {now_ms, suspects, group, more, highest lease number so far, then for each lease: id,
--   returns, deaths, message}
local worker, queue, k = ARGV[1], ARGV[2], tonumber(ARGV[3])
local max_bytes, lease_ms, slots = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local ttl_ms, date = tonumber(ARGV[7]), ARGV[8]
local EXAMINE = 1000 -- messages looked at in one call, dropped ones included
local now = now_ms()
unblock()
-- Leases are written last: a key of another type must be found before a message is moved.
redis.call('HDEL', 'warmq:worker:' .. worker, '')
local highest = tonumber(redis.call('GET', 'warmq:lease_seq') or 0)
if highest < tonumber(ARGV[9]) then
  highest = tonumber(ARGV[9])
  redis.call('SET', 'warmq:lease_seq', ARGV[9])
end
local out, leased, examined, bytes, free_numbers = {}, 0, 0, 0, 0
local any_returns = redis.call('EXISTS', 'warmq:returns') == 1
local any_revoked = redis.call('EXISTS', 'warmq:revoked') == 1
local records, ends = {}, {} -- of the leases: (id, record) and (when it ends, id)

local function is_revoked(id)
  local until_s = any_revoked and redis.call('ZSCORE', 'warmq:revoked', id)
  return until_s and tonumber(until_s) * 1000 > now
end

-- The list of a message's own priority, from whichever list of the queue it was taken.
local suspects = suspects_of(queue)
local function home_of(list, r) return list == suspects and queue .. r.step or list end

local function keep(list, message, r, outcome)
  local kept = kept_key(r.batch, r.id)
  redis.call('DEL', kept)
  redis.call('LMOVE', list, kept, 'RIGHT', 'LEFT')
  note_ended(r.batch, r.id, outcome, #message, home_of(list, r))
end

-- Takes a message that must not run from its list, with an ending if it has none; returns
-- whether it did.
local function end_unrun(list, message, r)
  local b = r.batch ~= '' and batch_state(r.batch)
  if b and not batch_alive(r.batch, r.life) then
    redis.call('LTRIM', list, 0, -2)
    if not b.life then forget_counts(r.id) end -- else they are those of a batch of the same name
    return true
  end
  local result = result_status(r.id)
  if result ~= '' and not (b and foreign(r.id, b)) then
    local outcome, home
    if b then outcome, home = noted_ending(r.batch, r.id) end
    if outcome and home == '' then keep(list, message, r, outcome) else redis.call('LTRIM', list, 0, -2) end
  else
    local code, text
    if b and b.cancelling or is_revoked(r.id) then
      code, text = 'cancelled', 'cancelled by the user'
    elseif r.deadline and r.deadline * 1000 < now then
      code, text = 'expired', 'not started before its deadline'
    else
      return false
    end
    commit_ending(r, ending_meta(r, 'TaskRevokedError', code, text, date), code, ttl_ms)
    if b then keep(list, message, r, code) else redis.call('LTRIM', list, 0, -2) end
  end
  if any_returns then forget_counts(r.id) end
  return true
end

local function next_number()
  if free_numbers == 0 then
    free_numbers = math.min(k - leased, EXAMINE)
    highest = redis.call('INCRBY', 'warmq:lease_seq', free_numbers)
  end
  free_numbers = free_numbers - 1
  return highest - free_numbers
end

local function lease(list, message, r)
  local id = worker .. '/' .. string.format('%d', next_number())
  local record = pack_lease({ slots = slots, size = #message, list = list,
                              home = home_of(list, r), id = r.id, batch = r.batch, life = r.life })
  redis.call('LMOVE', list, leased_key(id), 'RIGHT', 'LEFT')
  local at = #records
  records[at + 1], records[at + 2], ends[at + 1], ends[at + 2] = id, record, now + lease_ms, id
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
local function take_from(list)
  while not full do
    -- One at a time: a range of the list could be gigabytes.
    local message = redis.call('LINDEX', list, -1)
    if not message then break end
    if examined > 0 and bytes + #message > max_bytes or examined >= EXAMINE then full = true break end
    local r, reason = read_message(message)
    local usable, ended = r and true, nil
    -- A request whose result key has another type must not stop the queue.
    if r then usable, ended = pcall(end_unrun, list, message, r) end
    if not usable then
      dead_letter(list, { size = #message, home = list, id = '', batch = '', life = '' }, r,
                  reason or 'the key of its result has another type', now)
    elseif not ended then
      lease(list, message, r)
    end
    examined = examined + 1
    bytes = bytes + #message
    if leased >= k then full = true end
  end
end

local finished, problem = true, nil
for i = 10, #ARGV do
  finished, problem = pcall(take_from, ARGV[i])
  if full or not finished then break end
end
call_many('HSET', 'warmq:worker:' .. worker, records)
call_many('ZADD', 'warmq:leases', ends)
apply_to_batches(now)
if not finished then error(problem, 0) end
if bytes > 1024 * 1024 then collectgarbage() end
local head = { now, redis.call('LLEN', suspects), redis.call('GET', suspects .. ':group') or '0',
               full and 1 or 0, highest }
for i = 1, #out do head[5 + i] = out[i] end
return head
