-- Leases, and the return of their messages. A leased message is in a list that has no other message,
-- warmq:leased:<lease>, and scripts move it from key to key without decoding it. A lease's score in
-- warmq:leases is the time (ms) at which it expires. A negative score means that the message is returning to its
-- queue; a newer lease has a lower score and returns first.

-- Most bytes and messages that one script moves, because Redis serves no other client meanwhile.
local MOVE_BYTES, MOVE_COUNT = 4 * 1024 * 1024, 500

local function leased_key(lease) return 'warmq:leased:' .. lease end

-- Returns a lease's record: <slots> NUL <cost> NUL <size> NUL <list> NUL <home> NUL <request id> NUL <batch>
-- NUL <life>. <slots> are those of the worker's engine, <cost> are the charged tokens (charges.lua), <size> is
-- the message's bytes. The message returns to <list>, and a retry queues it in <home>, the list of its
-- priority (home list); the two differ for a suspect.
local function lease_record(slots, cost, size, list, home, id, batch, life)
  return slots .. '\0' .. cost .. '\0' .. size .. '\0' .. list .. '\0' .. home .. '\0' .. id ..
    '\0' .. batch .. '\0' .. life
end

local function pack_lease(leased)
  return lease_record(leased.slots, leased.cost, leased.size, leased.list, leased.home, leased.id,
                      leased.batch, leased.life)
end

local function unpack_lease(record)
  local slots, cost, size, list, home, id, batch, life =
    string.match(record, '^(%d+)%z(%d+)%z(%d+)%z(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)%z(.*)$')
  return { slots = tonumber(slots), cost = tonumber(cost), size = tonumber(size), list = list,
           home = home, id = id, batch = batch, life = life }
end

-- Returns a record's home, cost and size; makes no table, which the garbage collector would have to free.
local function charge_of(record)
  local cost, size, at = string.match(record, '^%d+%z(%d+)%z(%d+)%z()')
  local before = string.find(record, '\0', at, true) -- a pattern would test each byte
  local after = string.find(record, '\0', before + 1, true)
  return string.sub(record, before + 1, after - 1), tonumber(cost), tonumber(size)
end

local function lease_number(lease) return tonumber(string.match(lease, '/(%d+)$')) or 0 end

-- Returns the list of suspects of the queue that a list belongs to.
local function suspects_of(list)
  local queue = string.gsub(string.match(list, '^(.-)\6') or list, ':suspects$', '')
  return queue .. ':suspects'
end

-- Returns the record of a dead letter, which became one at `at` (ms).
local function pack_letter(leased, request, reason, at)
  return table.concat({ at, leased.size, leased.home, leased.id, leased.batch, leased.life,
                        cjson.encode(request and request.custom_id or cjson.null),
                        (string.gsub(reason, '%z', '?')) }, '\0')
end

-- Moves the last message of the list `from` to the dead letters. `leased` has its size, home, request id,
-- batch and life; `request` is what read_message returned, nil if it could not be read.
local function dead_letter(from, leased, request, reason, now)
  local letter = redis.call('INCR', 'warmq:lease_seq')
  redis.call('LMOVE', from, 'warmq:dead:' .. letter, 'RIGHT', 'LEFT')
  redis.call('HSET', 'warmq:dead', letter, pack_letter(leased, request, reason, now))
end

-- The key of a hash of the leases whose sequences or weight are not 1: <lease> -> <sequences> NUL <home>, then NUL
-- <weight> if the weight is not 1. The weight is the tenant's, by which the lease's tokens were divided. The
-- leases' records have neither, because workers of 0.2.0 read these records.
local SEQUENCES = 'warmq:sequences'

-- Ends a lease's charge: its sequences are no longer in flight, and `used` tokens replace the estimate `cost`.
-- `reported` is what the engine counted for an answer; false or nil if there is no answer.
local any_sequences
local function end_charge(lease, home, cost, used, reported)
  if any_sequences == nil then any_sequences = redis.call('EXISTS', SEQUENCES) == 1 end
  local noted = any_sequences and redis.call('HGET', SEQUENCES, lease)
  local sequences, weight = 1, 1
  if noted then
    sequences, weight = string.match(noted, '^(%d+)%z%Z*%z?([%d.]*)$')
    redis.call('HDEL', SEQUENCES, lease)
  end
  add_ended_charge(home, tonumber(sequences) or 1, cost, used, reported, tonumber(weight) or 1)
end

-- Ends sequences in flight whose lease has ended: a worker of 0.2.0 ends one sequence for each lease that it
-- sweeps.
local function end_leftover_charges()
  local noted = redis.call('HRANDFIELD', SEQUENCES, 20, 'WITHVALUES')
  for i = 1, #noted, 2 do
    local lease, worker = noted[i], string.match(noted[i], '^(.*)/%d+$')
    local runs = worker and redis.call('HEXISTS', worker_key(worker), lease) == 1
      and tonumber(redis.call('ZSCORE', LEASES, lease) or -1) >= 0
    if not runs then
      local sequences, home = string.match(noted[i + 1], '^(%d+)%z(%Z*)')
      if home then charge(home, 1 - tonumber(sequences), 0) end
      redis.call('HDEL', SEQUENCES, lease)
    end
  end
end

-- Removes a lease, and its message if that was not moved elsewhere.
local function drop_lease(worker, lease)
  redis.call('ZREM', LEASES, lease)
  redis.call('HDEL', worker_key(worker), lease)
  redis.call('UNLINK', leased_key(lease))
end

-- Makes a leased message a dead letter, and commits the ending of its request. If the request was cancelled
-- meanwhile, it has an ending already, and its message is kept for RETRY.
local function give_up(lease, leased, reason, now, ending, ttl_ms)
  local from, outcome, home = leased_key(lease), nil, nil
  if leased.batch ~= '' and batch_alive(leased.batch, leased.life) then
    outcome, home = noted_ending(leased.batch, leased.id)
  end
  if outcome and home == '' then
    redis.call('RENAME', from, kept_key(leased.batch, leased.id))
    note_ended(leased.batch, leased.id, outcome, leased.size, leased.home)
  elseif not outcome then
    local request = read_message(redis.call('LINDEX', from, 0) or '')
    dead_letter(from, leased, request, reason, now)
    if request then commit_ending(request, ending(request), 'failed', ttl_ms) end
  end
  forget_counts(leased.id)
end

-- Moves returning messages to the heads of their lists, at most MOVE_COUNT and MOVE_BYTES of them. The newest comes
-- first, so that the oldest is at its list's head in the end. Returns 1 if more are returning, else 0.
local function move_back()
  local moved_bytes, more = 0, 0
  local leases = redis.call('ZRANGEBYSCORE', LEASES, '-inf', '(0', 'LIMIT', 0, MOVE_COUNT + 1)
  for i, lease in ipairs(leases) do
    local worker = string.match(lease, '^(.*)/%d+$')
    local record = redis.call('HGET', worker_key(worker), lease)
    local leased = record and unpack_lease(record)
    if i > MOVE_COUNT or leased and i > 1 and moved_bytes + leased.size > MOVE_BYTES then
      more = 1
      break
    end
    local answer = leased and redis.pcall('LMOVE', leased_key(lease), leased.list, 'RIGHT', 'RIGHT')
    -- A list's key may have another type now: its messages wait, and the rest move on.
    if type(answer) ~= 'table' then
      drop_lease(worker, lease)
      if answer then note_pushed(leased.list, 1) end
    end
    moved_bytes = moved_bytes + (leased and leased.size or 0)
  end
  -- LMOVE's replies are in Lua's memory, which maxmemory does not count.
  if moved_bytes > 1024 * 1024 then collectgarbage() end
  return more
end

-- Notes why an attempt ended without an answer. The last ten of a request are kept, as long as results are.
local ATTEMPTS = 10
local function note_attempt(worker, leased, swept, now, ttl_ms)
  local key = attempts_key(leased.id)
  local why = swept and 'lease' or leased.died and 'died' or 'returned'
  if redis.call('LPUSH', key, now .. '\0' .. worker .. '\0' .. why) > ATTEMPTS then
    redis.call('LTRIM', key, 0, ATTEMPTS - 1)
  end
  redis.call('PEXPIRE', key, ttl_ms)
end

-- Marks leases as returning to the head of their own lists; move_back() then moves the messages. `leases` is a
-- list of {lease, died, and the record's fields}, the newest first. `died`: the engine died with the request
-- inside. If the engine died with suspects inside, half as many run together next. A suspect is poison at the
-- second death of an engine that ran nothing else; a single death may have another cause.
local function hand_back(worker, leases, max_deaths, now, date, ttl_ms, swept)
  local died_suspects, groups = {}, {}
  for _, leased in ipairs(leases) do
    if leased.died and leased.list == suspects_of(leased.list) then
      died_suspects[leased.list] = (died_suspects[leased.list] or 0) + 1
    end
  end
  for _, leased in ipairs(leases) do
    local target, deaths = leased.list, died_suspects[leased.list]
    -- A request that kills an engine pays the estimate; one that only returns pays nothing.
    end_charge(leased.lease, leased.home, leased.cost, leased.died and leased.cost or 0)
    if leased.batch ~= '' and not batch_alive(leased.batch, leased.life) then
      drop_lease(worker, leased.lease) -- its batch was deleted
      if not batch_state(leased.batch).life then forget_counts(leased.id) end
    else
      redis.call('HINCRBY', 'warmq:returns', leased.id, 1)
      note_attempt(worker, leased, swept, now, ttl_ms)
      if leased.died and redis.call('HINCRBY', 'warmq:deaths', leased.id, 1) >= max_deaths then
        target = suspects_of(leased.list)
      end
      if deaths == 1 and leased.died and redis.call('HINCRBY', 'warmq:deaths', alone_field(leased.id), 1) == 2 then
        local text = 'the engine died each time it ran this request'
        local function ending(request) return ending_meta(request, 'RequestFailed', 'poison', text, date) end
        give_up(leased.lease, leased, 'poison: ' .. text, now, ending, ttl_ms)
        redis.call('DEL', leased.list .. ':group')
        drop_lease(worker, leased.lease)
      else
        if deaths and leased.died then groups[leased.list] = math.ceil(deaths / 2) end
        leased.list = target
        redis.call('HSET', worker_key(worker), leased.lease, pack_lease(leased))
        redis.call('ZADD', LEASES, -lease_number(leased.lease), leased.lease)
      end
    end
  end
  for list, size in pairs(groups) do redis.call('SET', list .. ':group', size, 'PX', ttl_ms) end
  -- No script removes the counts of a request whose queue a user has emptied.
  redis.call('PEXPIRE', 'warmq:returns', ttl_ms)
  redis.call('PEXPIRE', 'warmq:deaths', ttl_ms)
end
