-- Leases, and the return of their messages. A leased message lies in a list of its own,
-- warmq:leased:<lease>, and moves from key to key without being decoded. The score in warmq:leases is when
-- a lease ends; a negative one: it is on its way back to a queue, the newest lease lowest.

-- Bounds of one script in bytes and messages: Redis serves nobody else meanwhile.
local MOVE_BYTES, MOVE_COUNT = 4 * 1024 * 1024, 500

local function leased_key(lease) return 'warmq:leased:' .. lease end

-- <slots> NUL <cost> NUL <size> NUL <list> NUL <home> NUL <request id> NUL <batch> NUL <life>: slots of the
-- engine that has it, tokens charged (turns.lua), the list to which the message returns, and the list in
-- which it is retried.
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

-- A record's home, cost and size alone, without a table for the garbage collector.
local function charge_of(record)
  local cost, size, at = string.match(record, '^%d+%z(%d+)%z(%d+)%z()')
  local before = string.find(record, '\0', at, true) -- a pattern would test each byte
  local after = string.find(record, '\0', before + 1, true)
  return string.sub(record, before + 1, after - 1), tonumber(cost), tonumber(size)
end

local function lease_number(lease) return tonumber(string.match(lease, '/(%d+)$')) or 0 end

local function suspects_of(list)
  local queue = string.gsub(string.match(list, '^(.-)\6') or list, ':suspects$', '')
  return queue .. ':suspects'
end

local function pack_letter(leased, request, reason, at)
  return table.concat({ at, leased.size, leased.home, leased.id, leased.batch, leased.life,
                        cjson.encode(request and request.custom_id or cjson.null),
                        (string.gsub(reason, '%z', '?')) }, '\0')
end

-- Moves the last message in `from` to the dead letters. `leased` has size, home, request id, batch and
-- life, `request` is the message as it was read (nil if it cannot be read).
local function dead_letter(from, leased, request, reason, now)
  local letter = redis.call('INCR', 'warmq:lease_seq')
  redis.call('LMOVE', from, 'warmq:dead:' .. letter, 'RIGHT', 'LEFT')
  redis.call('HSET', 'warmq:dead', letter, pack_letter(leased, request, reason, now))
end

-- Sequences of a lease, and the weight by which its tokens were divided, where either is not 1. They are in
-- a hash next to the records, because workers of 0.2 read the records too: <lease> -> <sequences> NUL
-- <home>, then NUL <weight> where that is not 1.
local SEQUENCES = 'warmq:sequences'

-- Ends a lease's charge: its slots of the cap, and `cost` in favour of `used` tokens. `reported` are the
-- tokens that the engine counted for an answer, nil where there is none.
local any_sequences
local function end_charge(lease, home, cost, used, reported)
  if any_sequences == nil then any_sequences = redis.call('EXISTS', SEQUENCES) == 1 end
  local noted = any_sequences and redis.call('HGET', SEQUENCES, lease)
  local sequences, weight = 1, 1
  if noted then
    sequences, weight = string.match(noted, '^(%d+)%z%Z*%z?([%d.]*)$')
    redis.call('HDEL', SEQUENCES, lease)
  end
  end_turn(home, tonumber(sequences) or 1, cost, used, reported, tonumber(weight) or 1)
end

-- A worker of 0.2 sweeps a lease as one of one sequence: the rest of its charge is ended here.
local function end_left_charges()
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

local function drop_lease(worker, lease)
  redis.call('ZREM', LEASES, lease)
  redis.call('HDEL', worker_key(worker), lease)
  redis.call('UNLINK', leased_key(lease))
end

-- Makes a leased message a dead letter with an ending. One that was cancelled meanwhile has its ending: it
-- is kept for RETRY, as if it had not run.
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

-- Moves returning messages, as many as MOVE_BYTES allow, the newest first, so that the oldest is at the
-- head of its list in the end. Returns 1 if any are left.
local function move_back()
  local moved, left = 0, 0
  local found = redis.call('ZRANGEBYSCORE', LEASES, '-inf', '(0', 'LIMIT', 0, MOVE_COUNT + 1)
  for i, lease in ipairs(found) do
    local worker = string.match(lease, '^(.*)/%d+$')
    local record = redis.call('HGET', worker_key(worker), lease)
    local leased = record and unpack_lease(record)
    if i > MOVE_COUNT or leased and i > 1 and moved + leased.size > MOVE_BYTES then
      left = 1
      break
    end
    local answer = leased and redis.pcall('LMOVE', leased_key(lease), leased.list, 'RIGHT', 'RIGHT')
    -- A key that is not a list must not stop the rest; its messages wait until it is one.
    if type(answer) ~= 'table' then
      drop_lease(worker, lease)
      if answer then note_pushed(leased.list, 1) end
    end
    moved = moved + (leased and leased.size or 0)
  end
  -- LMOVE's replies are in Lua's memory, which maxmemory does not count.
  if moved > 1024 * 1024 then collectgarbage() end
  return left
end

-- Notes why an attempt ended without an answer: the last ten of a request, for as long as results are kept.
local ATTEMPTS = 10
local function note_attempt(worker, leased, swept, now, ttl_ms)
  local key = attempts_key(leased.id)
  local why = swept and 'lease' or leased.died and 'died' or 'returned'
  if redis.call('LPUSH', key, now .. '\0' .. worker .. '\0' .. why) > ATTEMPTS then
    redis.call('LTRIM', key, 0, ATTEMPTS - 1)
  end
  redis.call('PEXPIRE', key, ttl_ms)
end

-- Marks leases as returning to the head of their own lists; move_back() then moves the messages. `leases`
-- is a list of {lease, died, and the record's fields}, newest first. A death inside the suspects' list
-- halves the group; a request that dies alone a second time is the culprit: the first death may have had a
-- cause outside.
local function hand_back(worker, leases, max_deaths, now, date, ttl_ms, swept)
  local died_suspects, groups = {}, {}
  for _, leased in ipairs(leases) do
    if leased.died and leased.list == suspects_of(leased.list) then
      died_suspects[leased.list] = (died_suspects[leased.list] or 0) + 1
    end
  end
  for _, leased in ipairs(leases) do
    local target, deaths = leased.list, died_suspects[leased.list]
    -- A request that kills an engine pays for it.
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
      if deaths == 1 and leased.died and redis.call('HINCRBY', 'warmq:deaths', alone(leased.id), 1) == 2 then
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
  -- Nobody clears the counts of a request whose queue is emptied from outside.
  redis.call('PEXPIRE', 'warmq:returns', ttl_ms)
  redis.call('PEXPIRE', 'warmq:deaths', ttl_ms)
end
