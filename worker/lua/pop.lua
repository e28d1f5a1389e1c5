-- POP: lease up to k messages; it examines no more than max_bytes of them, but at least one. Of each
-- priority, the highest first, tenants and their lists have turns (contract/lua/turns.lua). A turn is a run
-- of neighbours, as long as an engine's prefix cache needs it and no longer than its slots; it continues in
-- the worker's next POP, which names it. A request of many sequences takes as much of a turn and of its
-- tenant's cap; one that is larger than the cap runs when the tenant runs nothing. The leases are written
-- at the end, also after an error, so that none is lost.
-- ARGV: worker, queue, k, max_bytes, lease_ms, slots, ttl_ms, date, floor, list of the turn that
--   goes on ('' for none), sequences left of it, how many requests of many sequences to lease at most,
--   the model's context in tokens (0: not known), tenants to take nothing of now, \6 after each, then
--   list keys of which alone to take messages
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
local EXAMINE = 1000 -- messages examined in one call, dropped ones included
local most_unusable = 100 -- unusable messages of one list in one call: the rest is for later calls
-- Lists of one tenant that are skipped in one call, and of all.
local PASSES, ALL_PASSES = 8, 500
-- Runs of 32 neighbours keep more than 95 % of the prefix cache's gain from small groups; and a new tenant
-- waits no longer than the slots take to be refilled.
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
local function home_of(list, request)
  if list ~= suspects then return list end
  if request.batch ~= '' then return batch_state(request.batch).list or queue .. request.step end
  return request.tenant and tenant_list(queue, request.step, request.tenant) or queue .. request.step
end

local function keep(list, message, request, outcome)
  local kept = kept_key(request.batch, request.id)
  redis.call('DEL', kept)
  redis.call('LMOVE', list, kept, 'RIGHT', 'LEFT')
  note_ended(request.batch, request.id, outcome, #message, home_of(list, request))
end

-- Takes a message that must not run from its list, with an ending if it has none; returns whether it did.
local function end_unrun(list, message, request)
  local state = request.batch ~= '' and batch_state(request.batch)
  if state and not state.life and string.match(list, '\6[^\6]*\6([^\6]*)$') == request.batch then
    -- The list belongs to a batch that is gone: all of it is removed.
    local waiting = redis.call('LLEN', list)
    redis.call('UNLINK', list)
    if waiting > 1 then add_to_queue(queue, 'waiting', 1 - waiting) end
    forget_counts(request.id)
    return true
  end
  if state and not batch_alive(request.batch, request.life) then
    redis.call('LTRIM', list, 0, -2)
    if not state.life then forget_counts(request.id) end -- else they are those of a batch of the same name
    return true
  end
  local result = result_status(request.id)
  if result ~= '' and not (state and foreign(request.id, state)) then
    local outcome, home
    if state then outcome, home = noted_ending(request.batch, request.id) end
    if outcome and home == '' then
      keep(list, message, request, outcome)
    else
      redis.call('LTRIM', list, 0, -2)
    end
  else
    local code, text
    if state and state.cancelling or is_revoked(request.id) then
      code, text = 'cancelled', 'cancelled by the user'
    elseif request.deadline and request.deadline * 1000 < now then
      code, text = 'expired', 'not started before its deadline'
    else
      return false
    end
    commit_ending(request, ending_meta(request, 'TaskRevokedError', code, text, date), code, ttl_ms)
    if state then keep(list, message, request, code) else redis.call('LTRIM', list, 0, -2) end
  end
  if any_returns then forget_counts(request.id) end
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
local function lease(list, message, request)
  local id = worker .. '/' .. string.format('%d', next_number())
  local state = request.batch ~= '' and batch_state(request.batch)
  local cost = cost_of(list, state, message, request.sequences, context)
  local home = home_of(list, request)
  local record = lease_record(slots, string.format('%d', cost), #message, list, home, request.id,
                              request.batch, request.life)
  if list == suspects then
    charge(home, request.sequences, cost)
  else
    charged, charged_tokens = charged + request.sequences, charged_tokens + cost
  end
  redis.call('LMOVE', list, leased_key(id), 'RIGHT', 'LEFT')
  local at = #records
  records[at + 1], records[at + 2], ends[at + 1], ends[at + 2] = id, record, now + lease_ms, id
  local _, _, tenant = place_of(home)
  local weight, sequences = terms_of(tenant), request.sequences
  if sequences > 1 or weight ~= 1 then
    local ending = weight ~= 1 and '\0' .. string.format('%.14g', weight) or ''
    noted[#noted + 1], noted[#noted + 2] = id, sequences .. '\0' .. home .. ending
    if sequences > 1 then many = many - 1 end
  end
  local returns, deaths = '0', '0'
  if any_returns then
    returns = redis.call('HGET', 'warmq:returns', request.id) or '0'
    deaths = redis.call('HGET', 'warmq:deaths', request.id) or '0'
  end
  local n = #out
  out[n + 1], out[n + 2], out[n + 3], out[n + 4], out[n + 5] = id, returns, deaths, message, tenant
  leased = leased + 1
end

-- `unusable_left`: whether unusable messages were left where they are.
local full, unusable_left = k <= 0, false

-- Skipped lists, whose next message has many sequences, for which this worker has no slots now, and skipped
-- tenants, which have only such lists, or as many as are examined.
local passed, passes, passed_bytes = {}, 0, 0
local without = pass_over(queue, ARGV[14], passed, PASSES)

-- The reason why a message must not be leased now, or nil: `budget` is what its tenant's cap left before this
-- run.
local function why_not(list, budget, sequences)
  if sequences > 1 and many <= 0 then return 'passed' end
  if charged + sequences <= budget then return nil end
  if charged > 0 then return 'capped' end
  local queue_of, _, tenant = place_of(list)
  return in_flight_of(queue_of, tenant) > 0 and 'capped' or nil
end

-- Takes messages from a list until `most` sequences are leased or none is left; returns the reason why the
-- next one stays.
local function take_from(list, most, budget)
  local unusable = 0
  while not full and charged < most do
    -- One at a time: a range of the list could be gigabytes.
    local message = redis.call('LINDEX', list, -1)
    if not message then break end
    if examined > 0 and bytes + #message > max_bytes or examined >= EXAMINE then full = true break end
    local request, reason, waits = read_message(message)
    local usable, ended = request and true, nil
    -- A request whose result key has another type must not stop the queue.
    if request then usable, ended = pcall(end_unrun, list, message, request) end
    if usable and reason and not ended then
      -- It has no ending: a request of a newer warmq, retried, goes to a worker that understands it.
      dead_letter(list, { size = #message, home = home_of(list, request), id = request.id, batch = request.batch,
                          life = request.life }, request, reason, now)
    elseif waits then
      local meta = ending_meta(waits, 'RequestRejected', 'invalid_request', reason, date)
      commit_ending(waits, meta, 'failed', ttl_ms)
      redis.call('LTRIM', list, 0, -2)
    elseif not usable then
      dead_letter(list, { size = #message, home = list, id = '', batch = '', life = '' }, request,
                  reason or 'the key of its result has another type', now)
    elseif not ended then
      -- Most requests fit into the cap; without one it does not count.
      local why = budget and (request.sequences > 1 or charged >= budget) and why_not(list, budget, request.sequences)
      if why == 'passed' then passed_bytes = passed_bytes + #message end
      if why then return why end
      lease(list, message, request)
    end
    examined, bytes = examined + 1, bytes + #message
    if leased >= k then full = true end
    if not usable or ended or reason then
      unusable, charged_tokens = unusable + 1, charged_tokens + 1 -- so that its next ones come later
      if unusable >= most_unusable and budget then
        unusable_left = true
        return 'passed'
      end
    end
  end
end

-- The turn that continues: its list, and how many sequences are left of it.
local turn, turn_left = ARGV[10], tonumber(ARGV[11])
-- Most tenants in one call whose turns end at their cap.
local capped, EXAMINE_CAPPED = 0, 500

-- The list whose turn it is at a priority, how many sequences it may give now, and how many its tenant's
-- cap leaves.
local function next_list(step)
  local ring = ring_of(queue, step)
  if turn_left > 0 and turn ~= '' and not passed[turn] then
    local of_queue, of_step, tenant = place_of(turn)
    local goes_on = of_queue == queue and of_step == step and not without[tenant]
    if goes_on and redis.call('ZSCORE', ring, tenant) then
      local budget = cap_left_at(queue, step, tenant)
      passed['\0' .. ring] = nil -- it may be one of those that were passed over
      if budget > 0 and redis.call('EXISTS', turn) == 1 then return turn, turn_left, budget end
    end
  end
  while true do
    local tenant = first_of(ring, ring .. '\6', passed, PASSES)
    if not tenant then return nil end
    local lists, budget = ring .. '\6' .. tenant, cap_left_at(queue, step, tenant)
    if budget <= 0 and capped >= EXAMINE_CAPPED then
      full = true return nil -- the rest at the next call
    elseif budget <= 0 then
      cap_turns(queue, step, tenant)
      capped = capped + 1
    else
      local list = first_of(lists, '', passed, PASSES)
      if list then
        turn, turn_left = list, TURN
        -- A tenant that waits alone needs no turns.
        local alone = redis.call('ZCARD', ring) == 1 and redis.call('ZCARD', lists) == 1
        return list, alone and math.huge or TURN, budget
      end
      if redis.call('EXISTS', lists) == 1 then passed[lists] = PASSES else leave(ring, tenant) end
    end
  end
end

-- Takes one run of messages and charges it, also after an error.
local function take_run(step, list, most, budget)
  local before, finished, why = examined, pcall(take_from, list, math.min(most, budget), budget)
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
      local list, most, budget = next_list(step)
      if not list then break end
      take_run(step, list, most, budget)
    end
    if full or passes >= ALL_PASSES or passed_bytes >= max_bytes then return end
  end
end

-- When nothing was leased, more unusable messages are removed.
local function take_all()
  take_turns()
  if leased == 0 and unusable_left and not full then
    most_unusable, unusable_left, passed, passes = EXAMINE, false, {}, 0
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
               (full or unusable_left) and 1 or 0, highest, turn, turn_left }
for i = 1, #out do head[7 + i] = out[i] end
return head
