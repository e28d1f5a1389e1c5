-- Charges requests to their tenants' counters: an estimate before they run, and the used tokens after that. The
-- keys are those of turns.lua.

-- The sums of the charges of leases that end in this script, by list; apply_charges applies them, once.
--   sequences: minus the number of sequences that end; count: number of leases
--   used, charged: used tokens and estimated tokens of all leases
--   weighted_used, weighted_charged: those of the leases whose tenant has a weight other than 1
--   share: used minus estimated tokens of these weighted leases, divided by the weight
--   used_share: used tokens of the weighted leases, divided by the weight
--   reported: tokens that engines counted for answers
--   unanswered, unanswered_used: number and used tokens of the leases without an answer
local ended_charges = {}
local function add_ended_charge(list, sequences, cost, used, reported, weight)
  local sum = ended_charges[list]
  if not sum then
    sum = { sequences = 0, count = 0, used = 0, charged = 0, reported = 0, unanswered = 0,
            unanswered_used = 0, weighted_used = 0, weighted_charged = 0, share = 0, used_share = 0 }
    ended_charges[list] = sum
  end
  sum.sequences, sum.count = sum.sequences - sequences, sum.count + 1
  sum.used, sum.charged = sum.used + used, sum.charged + cost
  if reported then
    sum.reported = sum.reported + reported
  else
    sum.unanswered, sum.unanswered_used = sum.unanswered + 1, sum.unanswered_used + used
  end
  if weight ~= 1 then
    sum.weighted_used, sum.weighted_charged = sum.weighted_used + used, sum.weighted_charged + cost
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
    -- The tokens of the leases with weight 1; for these leases, share and tokens are equal.
    local used, charged = sum.used - sum.weighted_used, sum.charged - sum.weighted_charged
    charge(list, sum.sequences, sum.used - sum.charged,
           { share = used - charged + sum.share, mean_used = sum.used / sum.count,
             mean_share = (used + sum.used_share) / sum.count })
    local answered = sum.count - sum.unanswered
    if answered > 0 then
      local queue, _, tenant = place_of(list)
      local key = turns_key(queue)
      if sum.reported > 0 then note_used(queue, tenant, string.format('%.0f', sum.reported)) end
      local mean = tonumber(redis.call('HGET', key, 'mean'))
      local answer_mean = (sum.used - sum.unanswered_used) / answered
      mean = mean and mean + (answer_mean - mean) * math.min(1, answered / MEAN_OVER) or answer_mean
      redis.call('HSET', key, 'mean', string.format('%.1f', mean))
      redis.call('PEXPIRE', key, QUEUE_MS)
    end
  end
end

-- Returns the estimated tokens of a text of `size` bytes.
local function cost_of_size(size)
  return math.max(1, math.min(math.floor(size / BYTES_A_TOKEN), MOST_COST))
end

-- Returns a message's size in bytes, in which each embedded picture, sound or video counts as MEDIUM_TOKENS tokens.
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

-- Makes POP skip all lists of some tenants; returns the tenants as a set. In `tenants`, \6 follows each name.
-- `skipped` counts the skips of each list, and those of each tenant in a ring (turns.lua); first_of skips a member
-- whose count is `most`.
local function skip_tenants(queue, tenants, skipped, most)
  local names = {}
  for tenant in string.gmatch(tenants, '([^\6]*)\6') do
    names[tenant] = true
    for _, step in ipairs({ '0', '3', '6', '9' }) do skipped[ring_of(queue, step) .. '\6' .. tenant] = most end
  end
  return names
end

-- Returns the first member of a ZSET that POP may serve: one with fewer than `most` skips.
-- skipped[prefix .. member] is a member's number of skips. skipped[NUL .. ring] is the place at which the next
-- search begins: members before it stay skipped, and a served member moves to a later place.
local function first_of(ring, prefix, skipped, most)
  local at = skipped['\0' .. ring] or 0
  while true do
    local member = redis.call('ZRANGE', ring, at, at)[1]
    skipped['\0' .. ring] = at
    if not member or (skipped[prefix .. member] or 0) < most then return member end
    at = at + 1
  end
end

-- Returns how many sequences a tenant's cap leaves for messages of a priority: none if a message of a higher
-- priority waits for the cap.
local function cap_left_at(queue, step, tenant)
  local sequences = cap_left_of(queue, tenant)
  return sequences < math.huge and waits_above(queue, step, tenant) and 0 or sequences
end
