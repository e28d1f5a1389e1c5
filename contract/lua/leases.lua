-- Leases, and the way back from them. A leased message lies in a list of its own,
-- warmq:leased:<lease>, and moves from key to key without being decoded. The score in warmq:leases
-- is when a lease ends; a negative one: it is on its way back to a queue, the newest lease lowest.

-- Bytes that one script moves, and messages: Redis serves nobody else meanwhile.
local MOVE_BYTES, MOVE_COUNT = 4 * 1024 * 1024, 500

local function leased_key(lease) return 'warmq:leased:' .. lease end

-- <slots> NUL <cost> NUL <size> NUL <list> NUL <home> NUL <request id> NUL <batch> NUL <life>: the
-- slots of the engine that holds it, the tokens it was charged for (turns.lua), where the message
-- goes back to, and where it is retried.
local function lease_record(slots, cost, size, list, home, id, batch, life)
  return slots .. '\0' .. cost .. '\0' .. size .. '\0' .. list .. '\0' .. home .. '\0' .. id ..
    '\0' .. batch .. '\0' .. life
end

local function pack_lease(l)
  return lease_record(l.slots, l.cost, l.size, l.list, l.home, l.id, l.batch, l.life)
end

local function unpack_lease(record)
  local slots, cost, size, list, home, id, batch, life =
    string.match(record, '^(%d+)%z(%d+)%z(%d+)%z(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)%z(.*)$')
  return { slots = tonumber(slots), cost = tonumber(cost), size = tonumber(size), list = list,
           home = home, id = id, batch = batch, life = life }
end

-- Of a record only what a charge needs: home, cost and size. Each table is work for the garbage
-- collector.
local function charge_of(record)
  local cost, size, at = string.match(record, '^%d+%z(%d+)%z(%d+)%z()')
  local before = string.find(record, '\0', at, true) -- a pattern would look at each byte
  local after = string.find(record, '\0', before + 1, true)
  return string.sub(record, before + 1, after - 1), tonumber(cost), tonumber(size)
end

local function lease_number(lease) return tonumber(string.match(lease, '/(%d+)$')) or 0 end

local function suspects_of(list)
  local queue = string.gsub(string.match(list, '^(.-)\6') or list, ':suspects$', '')
  return queue .. ':suspects'
end

local function pack_letter(l, r, reason, at)
  return table.concat({ at, l.size, l.home, l.id, l.batch, l.life,
                        cjson.encode(r and r.custom_id or cjson.null), (string.gsub(reason, '%z', '?')) }, '\0')
end

-- Moves the last message in `from` to the dead letters. `l` tells size, home, request id, batch
-- and life, `r` what its message says (nil if it cannot be read).
local function dead_letter(from, l, r, reason, now)
  local letter = redis.call('INCR', 'warmq:lease_seq')
  redis.call('LMOVE', from, 'warmq:dead:' .. letter, 'RIGHT', 'LEFT')
  redis.call('HSET', 'warmq:dead', letter, pack_letter(l, r, reason, now))
end

-- How many sequences a lease is charged for, and by which weight of its tenant its tokens were
-- divided. Where either is not 1 they are noted, in a hash beside the records, whose form workers of
-- 0.2 read, too: <lease> -> <sequences> NUL <home>, then NUL <weight> where that is not 1.
local SEQUENCES = 'warmq:sequences'

-- Ends what a lease is charged for: its slots of the cap, and `cost` for `used` tokens. `reported`
-- are those that the engine has told of an answer, nil where there is none.
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

-- A worker of 0.2 that sweeps ends a lease as one of one sequence: what it has left is ended here.
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

-- Gives a leased message up, as a dead letter with an ending of its own. One that was cancelled
-- meanwhile has its ending: it is kept for RETRY, as if it had not run.
local function give_up(lease, l, reason, now, ending, ttl_ms)
  local from, outcome, home = leased_key(lease), nil, nil
  if l.batch ~= '' and batch_alive(l.batch, l.life) then outcome, home = noted_ending(l.batch, l.id) end
  if outcome and home == '' then
    redis.call('RENAME', from, kept_key(l.batch, l.id))
    note_ended(l.batch, l.id, outcome, l.size, l.home)
  elseif not outcome then
    local r = read_message(redis.call('LINDEX', from, 0) or '')
    dead_letter(from, l, r, reason, now)
    if r then commit_ending(r, ending(r), 'failed', ttl_ms) end
  end
  forget_counts(l.id)
end

-- Moves messages on their way back, as many as MOVE_BYTES allow. The newest go first, so that
-- the oldest is at the head of its list in the end. Returns whether any are left.
local function move_back()
  local moved, left = 0, 0
  local found = redis.call('ZRANGEBYSCORE', LEASES, '-inf', '(0', 'LIMIT', 0, MOVE_COUNT + 1)
  for i, lease in ipairs(found) do
    local worker = string.match(lease, '^(.*)/%d+$')
    local record = redis.call('HGET', worker_key(worker), lease)
    local l = record and unpack_lease(record)
    if i > MOVE_COUNT or l and i > 1 and moved + l.size > MOVE_BYTES then
      left = 1
      break
    end
    local answer = l and redis.pcall('LMOVE', leased_key(lease), l.list, 'RIGHT', 'RIGHT')
    -- A list that is not a list must not stop the others; its messages wait until it is one.
    if type(answer) ~= 'table' then
      drop_lease(worker, lease)
      if answer then note_pushed(l.list, 1) end
    end
    moved = moved + (l and l.size or 0)
  end
  -- What LMOVE answers is in Lua's memory, which maxmemory does not count.
  if moved > 1024 * 1024 then collectgarbage() end
  return left
end

-- Notes in which way an attempt ended without an answer, for people who look: the last ten of a
-- request, for as long as results are kept.
local ATTEMPTS = 10
local function note_attempt(worker, l, swept, now, ttl_ms)
  local key = attempts_key(l.id)
  local why = swept and 'lease' or l.died and 'died' or 'returned'
  if redis.call('LPUSH', key, now .. '\0' .. worker .. '\0' .. why) > ATTEMPTS then
    redis.call('LTRIM', key, 0, ATTEMPTS - 1)
  end
  redis.call('PEXPIRE', key, ttl_ms)
end

-- Sends leases back to the head of their own lists; move_back() then moves the messages.
-- `leases` is a list of {lease, died, and the record's fields}, newest first.
-- A death inside the suspects' list halves the group; who dies alone a second time is
-- the culprit: one death somebody else may have caused, from outside.
local function hand_back(worker, leases, max_deaths, now, date, ttl_ms, swept)
  local died_suspects, groups = {}, {}
  for _, l in ipairs(leases) do
    if l.died and l.list == suspects_of(l.list) then
      died_suspects[l.list] = (died_suspects[l.list] or 0) + 1
    end
  end
  for _, l in ipairs(leases) do
    local target, deaths = l.list, died_suspects[l.list]
    end_charge(l.lease, l.home, l.cost, l.died and l.cost or 0) -- who kills an engine pays for it
    if l.batch ~= '' and not batch_alive(l.batch, l.life) then
      drop_lease(worker, l.lease) -- its batch was deleted
      if not batch_state(l.batch).life then forget_counts(l.id) end
    else
      redis.call('HINCRBY', 'warmq:returns', l.id, 1)
      note_attempt(worker, l, swept, now, ttl_ms)
      if l.died and redis.call('HINCRBY', 'warmq:deaths', l.id, 1) >= max_deaths then
        target = suspects_of(l.list)
      end
      if deaths == 1 and l.died and redis.call('HINCRBY', 'warmq:deaths', alone(l.id), 1) == 2 then
        local text = 'the engine died each time it ran this request'
        local function ending(r) return ending_meta(r, 'RequestFailed', 'poison', text, date) end
        give_up(l.lease, l, 'poison: ' .. text, now, ending, ttl_ms)
        redis.call('DEL', l.list .. ':group')
        drop_lease(worker, l.lease)
      else
        if deaths and l.died then groups[l.list] = math.ceil(deaths / 2) end
        l.list = target
        redis.call('HSET', worker_key(worker), l.lease, pack_lease(l))
        redis.call('ZADD', LEASES, -lease_number(l.lease), l.lease)
      end
    end
  end
  for list, size in pairs(groups) do redis.call('SET', list .. ':group', size, 'PX', ttl_ms) end
  -- Nothing ends the counts of a request whose queue somebody empties.
  redis.call('PEXPIRE', 'warmq:returns', ttl_ms)
  redis.call('PEXPIRE', 'warmq:deaths', ttl_ms)
end
