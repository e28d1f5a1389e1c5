-- DONE: end leases and commit their results. A worker that has lost a lease can still commit a success, but
-- no other ending.
-- ARGV: worker, ttl_ms, then for each lease: lease id, request id, batch, life (without a batch: for how many
--   ms the result is kept; '': ttl_ms), outcome ('': the request has no ending yet; 'ignored': it ends without
--   a result), flag ('1': keep the message for RETRY; 'cut': the answer ended at its max_tokens; else 0),
--   prompt tokens, completion tokens, meta
-- Touches: warmq:worker:<worker>, warmq:leased:<lease>, warmq:{leases,sequences,returns,deaths},
--   turns, endings
-- Returns: the number of results that were written.
local worker_hash, ttl_ms = worker_key(ARGV[1]), tonumber(ARGV[2])
local written, named, leases, messages, ids, alone_ids = 0, {}, {}, {}, {}, {}
allow_when_full()
local any_counts = redis.call('EXISTS', 'warmq:returns', 'warmq:deaths') > 0

for i = 3, #ARGV, 9 do named[#named + 1] = ARGV[i] end
-- One call reads the values of all leases: a call for each lease would take a tenth of the script's time.
local ends, records = ask_many('ZMSCORE', LEASES, named), ask_many('HMGET', worker_hash, named)

-- Keeps the message of an ended request for RETRY.
local function keep(lease, record, id, batch, outcome)
  local leased = unpack_lease(record)
  redis.call('RENAME', leased_key(lease), kept_key(batch, id))
  note_ended(batch, id, outcome, leased.size, leased.home)
end

-- Returns the tokens that a request has used: those that its engine reported. If it reported none: 0 without an
-- outcome, because the request runs under another lease; for an answer an estimate by the message's size; for a
-- rejected request REJECTION; for any other ending the lease's estimate.
local function cost_of_ending(outcome, flag, reported, cost, size)
  if reported > 0 then return math.min(reported, MOST_COST) end
  if outcome == '' then return 0 end
  if outcome == 'completed' then return cost_of_size(size) end
  if outcome == 'failed' and flag ~= '1' then return REJECTION end
  return math.max(1, cost)
end

-- Ends the charge of the n-th named lease, and commits the lease's result.
local function finish(n)
  local i, lease, owned, record = 9 * n - 6, named[n], ends[n], records[n]
  local id, batch, life, outcome, flag = ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  local prompt, completion, meta = tonumber(ARGV[i + 6]) or 0, tonumber(ARGV[i + 7]) or 0, ARGV[i + 8]
  if owned and tonumber(owned) >= 0 then -- else the charge ended when the message began to return
    if record then
      local home, cost, size = charge_of(record)
      local reported = prompt + completion
      local used = cost_of_ending(outcome, flag, reported, cost, size)
      end_charge(lease, home, cost, used, outcome == 'completed' and reported)
    end
  end
  if outcome == 'completed' or (owned and outcome ~= '') then
    local keep_ms = batch == '' and kept_ms(life, ttl_ms) or ttl_ms
    local wrote = outcome ~= 'ignored'
      and commit(id, meta, outcome, batch, life, keep_ms, prompt, completion)
    if wrote then
      written = written + 1
      if flag == 'cut' and batch ~= '' then add(batch_state(batch), 'cut', 1) end
    end
    if owned and batch ~= '' and batch_alive(batch, life) then
      if wrote then
        if flag == '1' then keep(lease, record, id, batch, outcome) end
      else
        -- The request was cancelled while it ran: `producer retry` needs its message, with any
        -- outcome here.
        local noted, home = noted_ending(batch, id)
        if noted and home == '' then keep(lease, record, id, batch, noted) end
      end
    end
    if any_counts then ids[#ids + 1], alone_ids[#alone_ids + 1] = id, alone_field(id) end
  end
  leases[n], messages[n] = lease, leased_key(lease)
end

local finished, problem = true, nil
for n = 1, #named do
  finished, problem = pcall(finish, n)
  if not finished then break end
end
call_many('ZREM', LEASES, leases)
call_many('HDEL', worker_hash, leases)
for i = 1, #messages, 1000 do
  redis.call('UNLINK', unpack(messages, i, math.min(i + 999, #messages)))
end
call_many('HDEL', 'warmq:returns', ids)
call_many('HDEL', 'warmq:deaths', ids)
call_many('HDEL', 'warmq:deaths', alone_ids)
apply_to_batches(now_ms())
apply_charges()
if not finished then error(problem, 0) end
return written
