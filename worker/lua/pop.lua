-- POP: lease up to k messages. It examines at most max_bytes of messages, but at least one message. The highest
-- priority comes first; within a priority tenants and their lists have turns (contract/lua/turns.lua). A turn
-- is a run of consecutive messages of one list. A turn that this POP cannot finish continues in the worker's next
-- POP, which names the list. A request of n sequences counts n in its turn and in its tenant's cap. A request
-- with more sequences than the cap runs when its tenant has nothing in flight. The leases are written at the
-- end, also after an error, so that none is lost.
-- ARGV: worker, queue, k, max_bytes, lease_ms, slots, ttl_ms, date, highest lease number that the worker
--   knows, list of the turn that continues ('' for none), sequences left of that turn, most requests of
--   several sequences to lease, the model's context in tokens (0: unknown), tenants of which to take nothing
--   now (\6 after each), then keys of lists: if any are given, messages are taken from these lists only. With
--   k = 0 none is leased: each of these lists loses the messages before its first message that may run.
--   If the first key is '', the lists after it are urgent: in a tenant's turn they come first, in this order.
--   The lease number is for a Redis that has lost its last writes: Redis must not give a number twice, or the
--   DONE of one request would drop the lease of another request.
-- Touches: the lists of waiting messages, <queue>:suspects*, warmq:{lease_seq,leases,sequences,dead,
--   returns,deaths,revoked}, warmq:dead:<n>, warmq:worker:<worker>, warmq:leased:<lease>, turns, endings
-- Returns: {now_ms, number of suspects, how many of them run together next (0: not set), 1 if messages may
--   be left that a POP could take, highest lease number so far, list of the turn that continues, sequences
--   left of it, then for each lease: id, returns, deaths, message, tenant, time (ms) at which the whole batch was
--   queued again or ''}
local worker, queue, k = ARGV[1], ARGV[2], tonumber(ARGV[3])
local max_bytes, lease_ms, slots = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local ttl_ms, date = tonumber(ARGV[7]), ARGV[8]
-- `urgent` has the urgent lists: as a set, and in order by the key of their tenant's lists.
local named, urgent = #ARGV > 14 and ARGV[15] ~= '', {}
for i = 16, named and 0 or #ARGV do
  local _, step, tenant = place_of(ARGV[i])
  local lists = ring_of(queue, step) .. '\6' .. tenant
  urgent[ARGV[i]], urgent[lists] = true, urgent[lists] or {}
  table.insert(urgent[lists], ARGV[i])
end
-- Most messages that one call examines.
local EXAMINE = 1000
-- Most unusable messages of one list that one call examines: messages that are removed instead of leased.
local most_unusable = 100
-- Most lists that one call skips, of one tenant and of all tenants.
local TENANT_SKIPS, ALL_SKIPS = 8, 500
-- Turns of 32 messages keep more than 95 % of what the prefix cache saves where few messages share a prefix.
-- No turn is longer than the slots: a new tenant waits no longer than it takes to refill them.
local TURN = math.max(1, math.min(LONGEST_TURN, tonumber(slots)))
-- `multi_left`: how many more requests of several sequences may be leased.
local multi_left, context, now = tonumber(ARGV[12]), tonumber(ARGV[13]), now_ms()
allow_when_full()
-- This call changes nothing. If the key has another type, the script fails here, before it moves a message.
redis.call('HDEL', worker_key(worker), '')
local highest = tonumber(redis.call('GET', 'warmq:lease_seq') or 0)
if highest < tonumber(ARGV[9]) then
  highest = tonumber(ARGV[9])
  redis.call('SET', 'warmq:lease_seq', ARGV[9])
end
-- `out` is the reply; its first seven values are set at the end.
local out, leased, examined, bytes, free_numbers = { 0, 0, 0, 0, 0, 0, 0 }, 0, 0, 0, 0
local any_returns = redis.call('EXISTS', 'warmq:returns') == 1
local any_revoked = redis.call('EXISTS', 'warmq:revoked') == 1
-- What is written at the end: (id, record) and (expiry, id) of each lease; (id, value of SEQUENCES) of leases
-- with several sequences or a weight.
local records, ends, noted = {}, {}, {}

local function is_revoked(id)
  local until_s = any_revoked and redis.call('ZSCORE', 'warmq:revoked', id)
  return until_s and tonumber(until_s) * 1000 > now
end

-- Returns the list in which a retry queues a message: the list it is taken from; for a suspect, the list of
-- its priority.
local suspects = suspects_of(queue)
local function home_of(list, request)
  if list ~= suspects then return list end
  if request.batch ~= '' then
    local own = batch_state(request.batch).list
    if own and place_of(own) ~= queue then own = list_in(queue, own) end -- a batch of several queues
    return own or queue .. request.suffix
  end
  return request.tenant and tenant_list(queue, request.suffix, request.tenant) or queue .. request.suffix
end

-- Keeps the last message of a list for RETRY.
local function keep(list, message, request, outcome)
  local kept = kept_key(request.batch, request.id)
  redis.call('DEL', kept)
  redis.call('LMOVE', list, kept, 'RIGHT', 'LEFT')
  note_ended(request.batch, request.id, outcome, #message, home_of(list, request))
end

local BY_USER = 'cancelled by the user'
local function why_cancelled(batch, state)
  if not state.why then
    local stopped, reason = unpack(redis.call('HMGET', batch_key(batch), 'stopped', 'reason'))
    state.why = stopped and reason or BY_USER
  end
  return state.why
end

-- Removes the last message of a list if it must not run: its batch is gone, or its request has an ending, is
-- cancelled or expired. Commits the ending if the request has none. Returns whether it removed the message.
local function end_unrun(list, message, request)
  local state = request.batch ~= '' and batch_state(request.batch)
  if state and not state.life and string.match(list, '\6[^\6]*\6([^\6]*)$') == request.batch then
    -- No other batch uses this list: all its messages are removed.
    local waiting = redis.call('LLEN', list)
    redis.call('UNLINK', list)
    if waiting > 1 then add_to_queue(queue, 'waiting', 1 - waiting) end
    forget_counts(request.id)
    return true
  end
  if state and not batch_alive(request.batch, request.life) then
    redis.call('LTRIM', list, 0, -2)
    -- If a newer batch has the id, the counts may be those of its request.
    if not state.life then forget_counts(request.id) end
    return true
  end
  local result = result_status(request.id)
  if result ~= '' and not (state and is_foreign_result(request.id, state)) then
    local outcome, home
    if state then outcome, home = noted_ending(request.batch, request.id) end
    if outcome and home == '' then -- CANCEL ended the request while its message waited here
      keep(list, message, request, outcome)
    else
      redis.call('LTRIM', list, 0, -2)
    end
  else
    local code, text
    if state and state.cancelling or is_revoked(request.id) then
      code, text = 'cancelled', state and why_cancelled(request.batch, state) or BY_USER
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

-- Sequences and tokens that the current run of messages is charged (take_run).
local charged, charged_tokens = 0, 0
-- Leases the last message of a list.
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
  local weight, sequences = weight_and_cap_of(tenant), request.sequences
  if sequences > 1 or weight ~= 1 then
    local ending = weight ~= 1 and '\0' .. string.format('%.14g', weight) or ''
    noted[#noted + 1], noted[#noted + 2] = id, sequences .. '\0' .. home .. ending
    if sequences > 1 then multi_left = multi_left - 1 end
  end
  local returns, deaths = '0', '0'
  if any_returns then
    returns = redis.call('HGET', 'warmq:returns', request.id) or '0'
    deaths = redis.call('HGET', 'warmq:deaths', request.id) or '0'
  end
  local n = #out
  out[n + 1], out[n + 2], out[n + 3], out[n + 4], out[n + 5] = id, returns, deaths, message, tenant
  out[n + 6] = state and state.requeued or ''
  leased = leased + 1
end

-- `full`: this call takes no more. `unusable_left`: a list has more than `most_unusable` unusable messages.
local full, unusable_left = k <= 0 and not named, false

-- Skips by list, and by the key of a tenant's lists (skip_tenants, first_of). A list is skipped if its next
-- message has more sequences than this worker takes now, or if it has too many unusable messages. A tenant is
-- skipped after TENANT_SKIPS of its lists, or if all of them are skipped.
local skipped, skips, skipped_bytes = {}, 0, 0
local excluded = skip_tenants(queue, ARGV[14], skipped, TENANT_SKIPS)

-- Returns why a message must not be leased now, or nil. `budget` is how many sequences its tenant's cap left
-- before this run.
local function why_not(list, budget, sequences)
  if sequences > 1 and multi_left <= 0 then return 'skipped' end
  if charged + sequences <= budget then return nil end
  if charged > 0 then return 'capped' end
  local queue_of, _, tenant = place_of(list)
  return in_flight_of(queue_of, tenant) > 0 and 'capped' or nil
end

-- Takes messages from a list until `most` sequences are leased. Returns why the next message stays; nil if there
-- is no message, or this call takes no more. `budget` is nil while leases are taken from lists named in
-- ARGV.
local function take_from(list, most, budget)
  local unusable = 0
  while not full and charged < most do
    -- Messages are read one at a time: a range of the list could be gigabytes.
    local message = redis.call('LINDEX', list, -1)
    if not message then break end
    if examined > 0 and bytes + #message > max_bytes or examined >= EXAMINE then full = true break end
    local request, reason, id_only = read_message(message)
    local usable, ended = request and true, nil
    -- A request whose result key has another type must not stop the queue.
    if request then usable, ended = pcall(end_unrun, list, message, request) end
    if usable and reason and not ended then
      -- No ending is committed: after an upgrade of the workers the dead letter can be retried.
      dead_letter(list, { size = #message, home = home_of(list, request), id = request.id, batch = request.batch,
                          life = request.life }, request, reason, now)
    elseif id_only then
      local meta = ending_meta(id_only, 'RequestRejected', 'invalid_request', reason, date)
      commit_ending(id_only, meta, 'failed', ttl_ms)
      redis.call('LTRIM', list, 0, -2)
    elseif not usable then
      dead_letter(list, { size = #message, home = list, id = '', batch = '', life = '' }, request,
                  reason or 'the key of its result has another type', now)
    elseif not ended then
      if k <= 0 then return 'usable' end
      -- Only a request that may exceed a limit is checked, because most do not.
      local why = budget and (request.sequences > 1 or charged >= budget) and why_not(list, budget, request.sequences)
      if why == 'skipped' then skipped_bytes = skipped_bytes + #message end
      if why then return why end
      lease(list, message, request)
    end
    examined, bytes = examined + 1, bytes + #message
    if k > 0 and leased >= k then full = true end
    if not usable or ended or reason then
      -- A token is charged, so that other lists have turns between many unusable messages.
      unusable, charged_tokens = unusable + 1, charged_tokens + 1
      if unusable >= most_unusable and budget then
        unusable_left = true
        return 'skipped'
      end
    end
  end
end

-- The list whose turn it is, and how many sequences are left of its turn.
local turn, turn_left = ARGV[10], tonumber(ARGV[11])
-- The number of tenants that this call has moved to the capped tenants, and the most that it may move.
local capped, EXAMINE_CAPPED = 0, 500

-- Returns the list whose turn it is at a priority, how many sequences may be taken from it now, and how many
-- its tenant's cap leaves; nil if no list has messages that this call may take.
local function next_list(step)
  local ring = ring_of(queue, step)
  if turn_left > 0 and turn ~= '' and not skipped[turn] then
    local turn_queue, turn_step, tenant = place_of(turn)
    local continues = turn_queue == queue and turn_step == step and not excluded[tenant]
      and (urgent[turn] or not urgent[ring .. '\6' .. tenant])
    if continues and redis.call('ZSCORE', ring, tenant) then
      local budget = cap_left_at(queue, step, tenant)
      skipped['\0' .. ring] = nil -- the tenant may be before the place where the search goes on
      if budget > 0 and redis.call('EXISTS', turn) == 1 then return turn, turn_left, budget end
    end
  end
  while true do
    local tenant = first_of(ring, ring .. '\6', skipped, TENANT_SKIPS)
    if not tenant then return nil end
    local lists, budget = ring .. '\6' .. tenant, cap_left_at(queue, step, tenant)
    if budget <= 0 and capped >= EXAMINE_CAPPED then
      full = true return nil -- the next call moves the rest
    elseif budget <= 0 then
      cap_turns(queue, step, tenant)
      capped = capped + 1
    else
      local list
      for _, each in ipairs(urgent[lists] or {}) do
        if not list and not skipped[each] and redis.call('EXISTS', each) == 1 then list = each end
      end
      list = list or first_of(lists, '', skipped, TENANT_SKIPS)
      if list then
        turn, turn_left = list, TURN
        -- The only list with messages needs no turns.
        local only = redis.call('ZCARD', ring) == 1 and redis.call('ZCARD', lists) == 1
        return list, only and math.huge or TURN, budget
      end
      if redis.call('EXISTS', lists) == 1 then skipped[lists] = TENANT_SKIPS else leave(ring, tenant) end
    end
  end
end

-- Takes one run of messages from a list and charges it, also after an error.
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
  elseif why == 'skipped' then
    local lists = ring_of(queue, step) .. '\6' .. select(3, place_of(list))
    local of_tenant = (skipped[lists] or 0) + 1
    skipped[list], skipped[lists], skips = TENANT_SKIPS, of_tenant, skips + 1
  end
end

local function take_turns()
  for _, step in ipairs({ '0', '3', '6', '9' }) do
    -- Celery pushes into kombu's list without join().
    local kombus = step == '0' and queue or queue .. '\6\22' .. step
    if redis.call('EXISTS', kombus) == 1 then join(kombus) end
    while not full and skips < ALL_SKIPS and skipped_bytes < max_bytes do
      local list, most, budget = next_list(step)
      if not list then break end
      take_run(step, list, most, budget)
    end
    if full or skips >= ALL_SKIPS or skipped_bytes >= max_bytes then return end
  end
end

-- Takes turns; if that leased nothing, removes more unusable messages.
local function take_all()
  take_turns()
  if leased == 0 and unusable_left and not full then
    most_unusable, unusable_left, skipped, skips = EXAMINE, false, {}, 0
    skip_tenants(queue, ARGV[14], skipped, TENANT_SKIPS)
    take_turns()
  end
end
-- Leases messages from the lists named in ARGV; with k = 0 only removes messages that must not run.
local function take_named()
  if k <= 0 then most_unusable = EXAMINE end
  for i = 15, #ARGV do
    if k > 0 then take_from(ARGV[i], math.huge) else take_run('', ARGV[i], math.huge, math.huge) end
  end
end

local finished, problem = pcall(named and take_named or take_all)
if not full and examined + skips == 0 and not named and not next(excluded)
   and redis.call('EXISTS', turns_key(queue) .. ':capped') == 0 then
  redis.call('HDEL', turns_key(queue), 'waiting') -- no message was found: a user may have removed a list
end
call_many('HSET', worker_key(worker), records)
call_many('ZADD', LEASES, ends)
call_many('HSET', SEQUENCES, noted)
apply_to_batches(now)
if not finished then error(problem, 0) end
if bytes > 1024 * 1024 then collectgarbage() end
out[1], out[2], out[3] = now, redis.call('LLEN', suspects), redis.call('GET', suspects .. ':group') or '0'
out[4], out[5], out[6], out[7] = (full or unusable_left) and 1 or 0, highest, turn, turn_left
return out
