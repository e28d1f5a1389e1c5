-- DONE: end leases and commit their results. A worker that has lost a lease can still commit a success, but
-- no other ending.
-- ARGV: worker, ttl_ms, then for each lease: lease id, request id, batch, life (without a batch: for how many
--   ms the result is kept; '': ttl_ms), outcome ('': the request has no ending yet; 'ignored': it ends without
--   a result), keep ('1': keep the message for RETRY; 'cut': the answer ended at its max_tokens; else 0),
--   prompt tokens, completion tokens, meta
-- Touches: warmq:worker:<worker>, warmq:leased:<lease>, warmq:{leases,sequences,returns,deaths},
--   turns, endings
-- Returns: the number of results that were written.
local worker_hash, ttl_ms = worker_key(ARGV[1]), tonumber(ARGV[2])
local written, given, leases, messages, ids, alone_ids = 0, {}, {}, {}, {}, {}
allow_when_full()
local any_counts = redis.call('EXISTS', 'warmq:returns', 'warmq:deaths') > 0

for i = 3, #ARGV, 9 do given[#given + 1] = ARGV[i] end
-- Read for all in one call: a call for each costs a tenth of the script.
local ends, records = ask_many('ZMSCORE', LEASES, given), ask_many('HMGET', worker_hash, given)

local function keep(lease, record, id, batch, outcome)
  local leased = unpack_lease(record)
  redis.call('RENAME', leased_key(lease), kept_key(batch, id))
  note_ended(batch, id, outcome, leased.size, leased.home)
end

-- Returns the tokens that a request has used: those that its engine reported; else for an answer an estimate by
-- its size, for a rejected request REJECTION, for any other ending the lease's estimate, and nothing without an
-- outcome: the request runs under another lease.
local function cost_of_ending(outcome, kept, reported, cost, size)
  if reported > 0 then return math.min(reported, MOST_COST) end
  if outcome == '' then return 0 end
  if outcome == 'completed' then return cost_of_size(size) end
  if outcome == 'failed' and kept ~= '1' then return REJECTION end
  return math.max(1, cost)
end

local function finish(n)
  local i, lease, owned, record = 9 * n - 6, given[n], ends[n], records[n]
  local id, batch, life, outcome = ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local prompt, completion = tonumber(ARGV[i + 6]) or 0, tonumber(ARGV[i + 7]) or 0
  if owned and tonumber(owned) >= 0 then -- else the charge ended when the message began to return
    if record then
      local home, cost, size = charge_of(record)
      local reported = prompt + completion
      local used = cost_of_ending(outcome, ARGV[i + 5], reported, cost, size)
      end_charge(lease, home, cost, used, outcome == 'completed' and reported)
    end
  end
  if outcome == 'completed' or (owned and outcome ~= '') then
    local keep_ms = batch == '' and kept_ms(life, ttl_ms) or ttl_ms
    local wrote = outcome ~= 'ignored'
      and commit(id, ARGV[i + 8], outcome, batch, life, keep_ms, prompt, completion)
    if wrote then
      written = written + 1
      if ARGV[i + 5] == 'cut' and batch ~= '' then add(batch_state(batch), 'cut', 1) end
    end
    if owned and batch ~= '' and batch_alive(batch, life) then
      if wrote then
        if ARGV[i + 5] == '1' then keep(lease, record, id, batch, outcome) end
      else
        -- Cancelled while it ran: `producer retry` needs the message, with any result.
        local noted, home = noted_ending(batch, id)
        if noted and home == '' then keep(lease, record, id, batch, noted) end
      end
    end
    if any_counts then ids[#ids + 1], alone_ids[#alone_ids + 1] = id, alone_field(id) end
  end
  leases[n], messages[n] = lease, leased_key(lease)
end

local finished, problem = true, nil
for n = 1, #given do
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
