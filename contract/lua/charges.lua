-- Charges of requests, before and after they ran. Keys are those of turns.lua.

-- Changes of leases that end, added up by list and applied once, at a script's end. `used` and `charged`
-- are tokens; `other_` are those of a weight that is not 1, `share` and `used_share` the same divided by
-- it; `unanswered` and `unanswered_used` are of requests without an answer.
local ended_turns = {}
local function end_turn(home, sequences, cost, used, reported, weight)
  local sum = ended_turns[home]
  if not sum then
    sum = { sequences = 0, count = 0, used = 0, charged = 0, reported = 0, unanswered = 0,
            unanswered_used = 0, other_used = 0, other_charged = 0, share = 0, used_share = 0 }
    ended_turns[home] = sum
  end
  sum.sequences, sum.count = sum.sequences - sequences, sum.count + 1
  sum.used, sum.charged = sum.used + used, sum.charged + cost
  if reported then
    sum.reported = sum.reported + reported
  else
    sum.unanswered, sum.unanswered_used = sum.unanswered + 1, sum.unanswered_used + used
  end
  if weight ~= 1 then
    sum.other_used, sum.other_charged = sum.other_used + used, sum.other_charged + cost
    sum.share = sum.share + (used - cost) / weight
    sum.used_share = sum.used_share + used / weight
  end
end

-- Life of an hour's tokens, in ms: the last hour and the one before are shown.
local USED_MS, HOUR_MS = 3 * 3600000, 3600000
local function note_used(queue, tenant, tokens)
  local key = 'warmq:used:' .. queue .. ':' .. math.floor(now_ms() / HOUR_MS)
  redis.call('HINCRBY', key, tenant, tokens)
  redis.call('PEXPIRE', key, USED_MS)
end

local function apply_turns()
  for list, sum in pairs(ended_turns) do
    local used, charged = sum.used - sum.other_used, sum.charged - sum.other_charged
    charge(list, sum.sequences, sum.used - sum.charged,
           { share = used - charged + sum.share, each = sum.used / sum.count,
             each_share = (used + sum.used_share) / sum.count })
    local answered = sum.count - sum.unanswered
    if answered > 0 then
      local queue, _, tenant = place_of(list)
      local key = turns_key(queue)
      if sum.reported > 0 then note_used(queue, tenant, string.format('%.0f', sum.reported)) end
      local mean = tonumber(redis.call('HGET', key, 'mean'))
      local found = (sum.used - sum.unanswered_used) / answered
      mean = mean and mean + (found - mean) * math.min(1, answered / MEAN_OVER) or found
      redis.call('HSET', key, 'mean', string.format('%.1f', mean))
      redis.call('PEXPIRE', key, QUEUE_MS)
    end
  end
end

-- The tokens of a text by its bytes.
local function cost_of_size(size)
  return math.max(1, math.min(math.floor(size / BYTES_A_TOKEN), MOST_COST))
end

-- The bytes of a message without its embedded pictures and other media.
local function text_bytes(message)
  local bytes, from = #message, 1
  while true do
    local _, begin = string.find(message, ';base64,', from, true)
    if not begin then return bytes end
    from = string.find(message, '"', begin, true) or #message
    bytes = bytes - (from - begin) + MEDIUM_TOKENS * BYTES_A_TOKEN
  end
end

-- Estimates a message's tokens: the mean of its batch's requests so far, else of the queue's, else by its
-- size and number of answers; at most what its sequences can have in the model's context (0: unknown). A
-- mean of 0 counts as none: some engines report no tokens.
local queue_means = {}
local function cost_of(list, state, message, sequences, context)
  local most = context > 0 and math.min(context * sequences, MOST_COST) or MOST_COST
  if state and state.mean then return state.mean < most and state.mean or most end
  local queue = place_of(list)
  if queue_means[queue] == nil then
    local mean = tonumber(redis.call('HGET', turns_key(queue), 'mean'))
    -- A whole number, as in the lease: the charge and its refund are the same.
    queue_means[queue] = mean and mean > 0 and math.max(1, math.floor(mean))
  end
  if queue_means[queue] then return math.min(queue_means[queue], most) end
  local text = math.min(cost_of_size(text_bytes(message)), context > 0 and context or UNKNOWN_TEXT)
  return math.min(text + UNKNOWN_ANSWER * sequences, most)
end

-- Makes POP skip all lists of tenants, named in a text with \6 after each; returns them as a set.
local function pass_over(queue, tenants, passed, most)
  local found = {}
  for tenant in string.gmatch(tenants, '([^\6]*)\6') do
    found[tenant] = true
    for _, step in ipairs({ '0', '3', '6', '9' }) do passed[ring_of(queue, step) .. '\6' .. tenant] = most end
  end
  return found
end

-- The first member of a ZSET that POP has not skipped too often. Its place is kept in `passed`, by NUL and
-- the key: a served member moves behind it, and those before it are not examined again.
local function first_of(ring, prefix, passed, most)
  local at = passed['\0' .. ring] or 0
  while true do
    local found = redis.call('ZRANGE', ring, at, at)[1]
    passed['\0' .. ring] = at
    if not found or (passed[prefix .. found] or 0) < most then return found end
    at = at + 1
  end
end

local function cap_left_at(queue, step, tenant)
  local budget = cap_left_of(queue, tenant)
  return budget < math.huge and waits_above(queue, step, tenant) and 0 or budget
end
