-- POP: lease up to k messages; it looks at no more than max_bytes of them, but at least at one.
-- Of each priority, the highest first, tenants and their lists have turns (contract/lua/turns.lua). A turn is a
-- run of neighbours, as long as an engine's prefix cache wants it and no longer than its slots; it
-- goes on in the worker's next POP, which names it. A request of many sequences takes as much of a
-- turn and of its tenant's cap; one that is larger than the cap runs when the tenant runs nothing.
-- The leases are written at the end, also after an error, so that it loses nothing.
-- ARGV: worker, queue, k, max_bytes, lease_ms, slots, ttl_ms, date, floor, list of the turn that
--   goes on ('' for none), sequences left of it, how many requests of many sequences to lease at most,
--   the model's context in tokens (0: not known), tenants to take nothing of now, \6 after each, then
--   list keys to look at nothing else
--   floor is the highest lease number this worker knows: a Redis that lost its last
--   writes must not give a number twice, or one request's DONE would drop another's lease
-- Touches: the lists of waiting messages, warmq:turns:*, warmq:{lease_seq,leases,sequences,dead,
--   returns,deaths,revoked}, warmq:dead:<n>, warmq:worker:<worker>, warmq:leased:<lease>,
--   warmq:batch:<id>*, celery-task-meta-<id>
-- Returns: {now_ms, suspects, group, more, highest lease number so far, list of the turn that goes
--   on, sequences left of it, then for each lease: id, returns, deaths, message, tenant}
local worker, queue, k = ARGV[1], ARGV[2], tonumber(ARGV[3])
local max_bytes, lease_ms, slots = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local ttl_ms, date = tonumber(ARGV[7]), ARGV[8]
local EXAMINE = 1000 -- messages looked at in one call, dropped ones included
local most_unused = 100 -- messages without a use, of one list in one call: others do not wait for all
-- Lists of one tenant that are passed over in one call, and of all.
local PASSES, ALL_PASSES = 8, 500
-- Runs of 32 neighbours keep more than 95 % of what the prefix cache gains from small groups; and a
-- tenant that comes waits for no longer than the slots take to be filled anew.
local TURN = math.max(1, math.min(LONGEST_TURN, tonumber(slots)))
local many, context, now = tonumber(ARGV[12]), tonumber(ARGV[13]), now_ms()
unblock()
-- Leases are written last: a key of another type must be found before a message is moved.
redis.call('HDEL', worker_key(worker), '')
local highest = tonumber(redis.call('GET', 'warmq:lease_seq') or 0)
if highest < tonumber(ARGV[9]) then
  highest = tonumber(ARGV[9])
  redis.call('SET', 'warmq:lease_seq', ARGV[9])
end
local out, leased, examined, bytes, free_numbers = {}, 0, 0, 0, 0
local any_returns = redis.call('EXISTS', 'warmq:returns') == 1
local any_revoked = redis.call('EXISTS', 'warmq:revoked') == 1
local records, ends = {}, {} -- of the leases: (id, record) and (when it ends, id)
local noted = {} -- of those of many sequences, or a weight: (id, sequences, home and weight)

local function is_revoked(id)
  local until_s = any_revoked and redis.call('ZSCORE', 'warmq:revoked', id)
  return until_s and tonumber(until_s) * 1000 > now
end

-- The list of a message's own priority, from whichever list of the queue it was taken.
local suspects = suspects_of(queue)
local function home_of(list, r)
  if list ~= suspects then return list end
  if r.batch ~= '' then return batch_state(r.batch).list or queue .. r.step end
  return r.tenant and tenant_list(queue, r.step, r.tenant) or queue .. r.step
end

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
  if b and not b.life and string.match(list, '\6[^\6]*\6([^\6]*)$') == r.batch then
    -- The list is of a batch that is gone: all of it goes at once.
    local waiting = redis.call('LLEN', list)
    redis.call('UNLINK', list)
    if waiting > 1 then add_to_queue(queue, 'waiting', 1 - waiting) end
    forget_counts(r.id)
    return true
  end
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

local charged, charged_tokens = 0, 0
local function lease(list, message, r)
  local id = worker .. '/' .. string.format('%d', next_number())
  local cost = cost_of(list, r.batch ~= '' and batch_state(r.batch), message, r.sequences, context)
  local home = home_of(list, r)
  local record = lease_record(slots, string.format('%d', cost), #message, list, home, r.id, r.batch, r.life)
  if list == suspects then
    charge(home, r.sequences, cost)
  else
    charged, charged_tokens = charged + r.sequences, charged_tokens + cost
  end
  redis.call('LMOVE', list, leased_key(id), 'RIGHT', 'LEFT')
  local at = #records
  records[at + 1], records[at + 2], ends[at + 1], ends[at + 2] = id, record, now + lease_ms, id
  local _, _, tenant = place_of(home)
  local weight, sequences = terms_of(tenant), r.sequences
  if sequences > 1 or weight ~= 1 then
    local ending = weight ~= 1 and '\0' .. string.format('%.14g', weight) or ''
    noted[#noted + 1], noted[#noted + 2] = id, sequences .. '\0' .. home .. ending
    if sequences > 1 then many = many - 1 end
  end
  local returns, deaths = '0', '0'
  if any_returns then
    returns = redis.call('HGET', 'warmq:returns', r.id) or '0'
    deaths = redis.call('HGET', 'warmq:deaths', r.id) or '0'
  end
  local n = #out
  out[n + 1], out[n + 2], out[n + 3], out[n + 4], out[n + 5] = id, returns, deaths, message, tenant
  leased = leased + 1
end

-- `unused_left`: whether messages without a use were left where they are.
local full, unused_left = k <= 0, false

-- Lists whose next message is one of many sequences, for which this worker has no room now, and
-- tenants of which all are such, or as many as are looked at.
local passed, passes, passed_bytes = {}, 0, 0
local without = pass_over(queue, ARGV[14], passed, PASSES)

-- Why a message must not be leased now, if so: `room` is what its tenant's cap left before this run.
local function why_not(list, room, sequences)
  if sequences > 1 and many <= 0 then return 'passed' end
  if charged + sequences <= room then return nil end
  if charged > 0 then return 'capped' end
  local queue_of, _, tenant = place_of(list)
  return in_flight_of(queue_of, tenant) > 0 and 'capped' or nil
end

-- Takes messages from a list until `most` sequences are leased or none is left; returns what kept
-- the next one back.
local function take_from(list, most, room)
  local unused = 0
  while not full and charged < most do
    -- One at a time: a range of the list could be gigabytes.
    local message = redis.call('LINDEX', list, -1)
    if not message then break end
    if examined > 0 and bytes + #message > max_bytes or examined >= EXAMINE then full = true break end
    local r, reason, waits = read_message(message)
    local usable, ended = r and true, nil
    -- A request whose result key has another type must not stop the queue.
    if r then usable, ended = pcall(end_unrun, list, message, r) end
    if usable and reason and not ended then
      -- It has no ending: one of a newer warmq, retried, goes to a worker that knows what it means.
      dead_letter(list, { size = #message, home = home_of(list, r), id = r.id, batch = r.batch,
                          life = r.life }, r, reason, now)
    elseif waits then
      commit_ending(waits, ending_meta(waits, 'RequestRejected', 'invalid_request', reason, date), 'failed', ttl_ms)
      redis.call('LTRIM', list, 0, -2)
    elseif not usable then
      dead_letter(list, { size = #message, home = list, id = '', batch = '', life = '' }, r,
                  reason or 'the key of its result has another type', now)
    elseif not ended then
      -- Most requests fit into the room; without one caps do not count.
      local why = room and (r.sequences > 1 or charged >= room) and why_not(list, room, r.sequences)
      if why == 'passed' then passed_bytes = passed_bytes + #message end
      if why then return why end
      lease(list, message, r)
    end
    examined, bytes = examined + 1, bytes + #message
    if leased >= k then full = true end
    if not usable or ended or reason then
      unused, charged_tokens = unused + 1, charged_tokens + 1 -- so that its next ones come later
      if unused >= most_unused and room then
        unused_left = true
        return 'passed'
      end
    end
  end
end

-- The turn that goes on: its list, and how many sequences are left of it.
local turn, turn_left = ARGV[10], tonumber(ARGV[11])
-- Tenants whose turns end because their cap is reached: so many in one call.
local capped, EXAMINE_CAPPED = 0, 500

-- The list whose turn it is among those of a priority, how many sequences it may give now, and how
-- many its tenant's cap leaves.
local function next_list(step)
  local ring = ring_of(queue, step)
  if turn_left > 0 and turn ~= '' and not passed[turn] then
    local of_queue, of_step, tenant = place_of(turn)
    local goes_on = of_queue == queue and of_step == step and not without[tenant]
    if goes_on and redis.call('ZSCORE', ring, tenant) then
      local room = room_at(queue, step, tenant)
      passed['\0' .. ring] = nil -- it may be one of those that were passed over
      if room > 0 and redis.call('EXISTS', turn) == 1 then return turn, turn_left, room end
    end
  end
  while true do
    local tenant = first_of(ring, ring .. '\6', passed, PASSES)
    if not tenant then return nil end
    local lists, room = ring .. '\6' .. tenant, room_at(queue, step, tenant)
    if room <= 0 and capped >= EXAMINE_CAPPED then
      full = true return nil -- the rest at the next call
    elseif room <= 0 then
      cap_turns(queue, step, tenant)
      capped = capped + 1
    else
      local list = first_of(lists, '', passed, PASSES)
      if list then
        turn, turn_left = list, TURN
        -- Where nobody else waits there is nobody to give turns to.
        local alone = redis.call('ZCARD', ring) == 1 and redis.call('ZCARD', lists) == 1
        return list, alone and math.huge or TURN, room
      end
      if redis.call('EXISTS', lists) == 1 then passed[lists] = PASSES else leave(ring, tenant) end
    end
  end
end

-- One run of messages, and what it costs; also after an error.
local function take_run(step, list, most, room)
  local before, finished, why = examined, pcall(take_from, list, math.min(most, room), room)
  if charged_tokens > 0 then charge(list, charged, charged_tokens) end
  turn_left, charged, charged_tokens = math.max(0, turn_left - charged), 0, 0
  if examined > before and not is_kombus(list) then
    add_to_queue(queue, 'waiting', before - examined)
  end
  if not finished then error(why, 0) end
  if redis.call('EXISTS', list) == 0 then
    drop_list(list)
    turn_left = 0
  elseif why == 'capped' then
    cap_turns(queue, step, (select(3, place_of(list))))
  elseif why == 'passed' then
    local lists = ring_of(queue, step) .. '\6' .. select(3, place_of(list))
    local of_tenant = (passed[lists] or 0) + 1
    passed[list], passed[lists], passes = PASSES, of_tenant, passes + 1
  end
end

local function take_turns()
  for _, step in ipairs({ '0', '3', '6', '9' }) do
    local plain = step == '0' and queue or queue .. '\6\22' .. step
    if redis.call('EXISTS', plain) == 1 then join(plain) end
    while not full and passes < ALL_PASSES and passed_bytes < max_bytes do
      local list, most, room = next_list(step)
      if not list then break end
      take_run(step, list, most, room)
    end
    if full or passes >= ALL_PASSES or passed_bytes >= max_bytes then return end
  end
end

-- Where nobody has got anything, nobody waits for the removal.
local function take_all()
  take_turns()
  if leased == 0 and unused_left and not full then
    most_unused, unused_left, passed, passes = EXAMINE, false, {}, 0
    pass_over(queue, ARGV[14], passed, PASSES)
    take_turns()
  end
end
local function take_named() for i = 15, #ARGV do take_from(ARGV[i], math.huge) end end

local finished, problem = pcall(#ARGV > 14 and take_named or take_all)
if not full and examined + passes == 0 and #ARGV <= 14 and not next(without) then forget_waiting(queue) end
call_many('HSET', worker_key(worker), records)
call_many('ZADD', LEASES, ends)
call_many('HSET', SEQUENCES, noted)
apply_to_batches(now)
if not finished then error(problem, 0) end
if bytes > 1024 * 1024 then collectgarbage() end
local head = { now, redis.call('LLEN', suspects), redis.call('GET', suspects .. ':group') or '0',
               (full or unused_left) and 1 or 0, highest, turn, turn_left }
for i = 1, #out do head[7 + i] = out[i] end
return head
