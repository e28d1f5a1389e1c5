-- Charges of requests, before and after they ran. The keys are those of turns.lua.

-- The charges of leases that end in this script, added up by list; apply_charges applies them, once. `used`
-- and `charged` are the used and the estimated tokens of all leases; `other_used` and `other_charged` those of
-- tenants with a weight other than 1, and `share` and `used_share` their difference and their used tokens
-- divided by that weight. `unanswered` and `unanswered_used` are of requests without an answer.
local ended_charges = {}
local function add_ended_charge(home, sequences, cost, used, reported, weight)
  local sum = ended_charges[home]
  if not sum then
    sum = { sequences = 0, count = 0, used = 0, charged = 0, reported = 0, unanswered = 0,
            unanswered_used = 0, other_used = 0, other_charged = 0, share = 0, used_share = 0 }
    ended_charges[home] = sum
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

-- Milliseconds for which an hour's tokens are kept: the last hour and the one before are shown.
local USED_MS, HOUR_MS = 3 * 3600000, 3600000
local function note_used(queue, tenant, tokens)
  local key = 'warmq:used:' .. queue .. ':' .. math.floor(now_ms() / HOUR_MS)
  redis.call('HINCRBY', key, tenant, tokens)
  redis.call('PEXPIRE', key, USED_MS)
end

-- Applies the charges of this script's ended leases, and adds their answers to the queue's mean.
local function apply_charges()
  for list, sum in pairs(ended_charges) do
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

-- Returns the estimated tokens of a text.
local function cost_of_size(size)
  return math.max(1, math.min(math.floor(size / BYTES_A_TOKEN), MOST_COST))
end

-- Returns the bytes of a message, with those of MEDIUM_TOKENS for each embedded picture or other medium.
local function text_bytes(message)
  local bytes, from = #message, 1
  while true do
    local _, begin = string.find(message, ';base64,', from, true)
    if not begin then return bytes end
    from = string.find(message, '"', begin, true) or #message
    bytes = bytes - (from - begin) + MEDIUM_TOKENS * BYTES_A_TOKEN
  end
end

-- Returns a request's estimated tokens: the mean of its batch's completed requests; else that of the queue;
-- else an estimate by the message's size and number of sequences. It is at most the model's context (0:
-- unknown) for each sequence. A mean of 0 is not used: some engines report no tokens.
local queue_means = {}
local function cost_of(list, state, message, sequences, context)
  local most = context > 0 and math.min(context * sequences, MOST_COST) or MOST_COST
  if state and state.mean then return state.mean < most and state.mean or most end
  local queue = place_of(list)
  if queue_means[queue] == nil then
    local mean = tonumber(redis.call('HGET', turns_key(queue), 'mean'))
    -- A whole number, because the lease's record has whole numbers: the refund must equal the charge.
    queue_means[queue] = mean and mean > 0 and math.max(1, math.floor(mean))
  end
  if queue_means[queue] then return math.min(queue_means[queue], most) end
  local text = math.min(cost_of_size(text_bytes(message)), context > 0 and context or UNKNOWN_TEXT)
  return math.min(text + UNKNOWN_ANSWER * sequences, most)
end

-- Makes POP skip all lists of some tenants; returns the tenants as a set. `tenants` has \6 after each. `skipped`
-- has the number of skips by list, and by the key of a tenant's lists; first_of skips those with `most`.
local function skip_tenants(queue, tenants, skipped, most)
  local found = {}
  for tenant in string.gmatch(tenants, '([^\6]*)\6') do
    found[tenant] = true
    for _, step in ipairs({ '0', '3', '6', '9' }) do skipped[ring_of(queue, step) .. '\6' .. tenant] = most end
  end
  return found
end

-- Returns the first member of a ZSET that POP may serve: one with fewer than `most` skips. `skipped` also has
-- the member's place, by NUL and the ZSET's key. The next search begins there: members before it stay skipped,
-- and a served member moves to a later place.
local function first_of(ring, prefix, skipped, most)
  local at = skipped['\0' .. ring] or 0
  while true do
    local found = redis.call('ZRANGE', ring, at, at)[1]
    skipped['\0' .. ring] = at
    if not found or (skipped[prefix .. found] or 0) < most then return found end
    at = at + 1
  end
end

-- Returns how many sequences a tenant's cap leaves for messages of a priority.
local function cap_left_at(queue, step, tenant)
  local budget = cap_left_of(queue, tenant)
  return budget < math.huge and waits_above(queue, step, tenant) and 0 or budget
end
