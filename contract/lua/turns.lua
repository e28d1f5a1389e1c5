-- Turns of tenants: virtual token counters (Sheng et al., "Fairness in Serving Large Language
-- Models", OSDI 2024). Each queue and priority has a ZSET of the tenants that have messages, the
-- ring (tenant -> tokens served, divided by the tenant's weight). Each tenant in it has a ZSET of
-- its lists (list key -> tokens served). POP serves the tenant with the smallest counter, and
-- among the tenant's lists the one with the smallest. <step> is kombu's priority step: 0 (highest), 3, 6 or 9.
-- Keys:
--   <queue>\6\22<step>\6<tenant>\6<batch>  messages of one batch; without <batch> those of all
--                                          batches with `--turn fifo`, in order of arrival
--   <queue>, <queue>\6\22<step>            kombu's lists: messages of the tenant `celery`
--   warmq:turns:<queue>\6<step>            the ring: tenants that have messages and are not capped
--   warmq:turns:<queue>\6<step>\6<tenant>  the lists of one tenant that have messages
--   warmq:turns:<queue>\6<step>:left       tenants without messages that were served more than
--                                          those in the ring: they return with that counter;
--                                          '' -> the highest counter that a tenant began with
--   warmq:turns:<queue>                    hash: `waiting`, messages in all lists but kombu's;
--                                          `mean`, tokens of a request; `in_flight:<tenant>`, sequences;
--                                          `floor:<step>\6<tenant>`, the highest counter that one of
--                                          the tenant's lists began with, while it has lists
--   warmq:turns:<queue>:capped             <step>\6<tenant>: the tenant has messages, and as many
--                                          sequences in flight as its cap allows
--   warmq:turns:<queue>:deadlines          ZSET: list of a batch with a deadline -> the deadline in ms, while
--                                          the list has turns
--   warmq:used:<queue>:<hour>              hash: tenant -> tokens of its answered requests in this hour
--                                          since 1970, shown to people; kept for three hours
--   warmq:tenants                          hash: tenant -> weight NUL cap ('' for none)
local CELERY = 'celery'
-- Estimated tokens of an answer of unknown length; estimated bytes of text for each token.
local UNKNOWN_ANSWER, BYTES_A_TOKEN = 64, 4
-- Most estimated text tokens of a request where neither a mean nor the model's context is known; estimated
-- tokens of a picture, whatever the size of its file.
local UNKNOWN_TEXT, MEDIUM_TOKENS = 16384, 1024
-- Most tokens that one request is charged, even if a server reports more; and the charge of a rejected
-- request, which took a place in a worker and time to be read.
local MOST_COST, REJECTION = 2 ^ 20, 16
-- Milliseconds for which the counter of a tenant without messages is kept, and those of an unused queue.
local LEFT_MS, QUEUE_MS = 600000, 7 * 86400000
-- Most requests of a turn.
local LONGEST_TURN = 32
-- An answer changes the queue's mean of tokens by 1/MEAN_OVER of the difference.
local MEAN_OVER = 256

local function turns_key(queue) return 'warmq:turns:' .. queue end
local function ring_of(queue, step) return turns_key(queue) .. '\6' .. step end

-- Adds to a counter of a queue; the counters expire some days after the queue's last use.
local function add_to_queue(queue, field, number)
  local key = turns_key(queue)
  local found = redis.call('HINCRBY', key, field, number)
  redis.call('PEXPIRE', key, QUEUE_MS)
  return found
end

-- Returns queue, step and tenant of a list of waiting messages. They are parsed once, because scripts need
-- them for every message.
local places = {}
local function place_of(list)
  local place = places[list]
  if place then return place[1], place[2], place[3] end
  local queue, step, tenant = string.match(list, '^(.-)\6\22(%d)\6([^\6]*)\6')
  if not queue then
    queue, step = string.match(list, '^(.-)\6\22(%d)$')
    queue, step, tenant = queue or list, step or '0', CELERY
  end
  places[list] = { queue, step, tenant }
  return queue, step, tenant
end

-- Returns the list of the same priority, tenant and batch in another queue.
local function list_in(queue, list) return queue .. string.match(list, '\6\22%d\6.*$') end

local function is_kombus(list) return not string.find(list, '\6\22%d\6') end

-- Returns the list of a tenant's messages that have no batch; `suffix` is that of a priority (suffix_of).
local function tenant_list(queue, suffix, tenant)
  return queue .. (suffix == '' and '\6\0220' or suffix) .. '\6' .. tenant .. '\6'
end

-- Returns weight and cap of a tenant; the cap is nil if the tenant has none.
local any_tenants
local known_tenants = {}
local function weight_and_cap_of(tenant)
  if any_tenants == nil then any_tenants = redis.call('EXISTS', 'warmq:tenants') == 1 end
  if not any_tenants then return 1, nil end
  local stored = known_tenants[tenant]
  if not stored then
    stored = redis.call('HGET', 'warmq:tenants', tenant) or ''
    known_tenants[tenant] = stored
  end
  local weight, cap = string.match(stored, '^([%d.]+)%z(%d*)$')
  return tonumber(weight) or 1, tonumber(cap)
end

-- Returns the number of a tenant's sequences in flight.
local function in_flight_of(queue, tenant)
  return tonumber(redis.call('HGET', turns_key(queue), 'in_flight:' .. tenant) or 0)
end

-- Returns how many more sequences a tenant may have in flight; math.huge without a cap.
local function cap_left_of(queue, tenant)
  local _, cap = weight_and_cap_of(tenant)
  return cap and cap - in_flight_of(queue, tenant) or math.huge
end

-- Returns the smallest counter of a ZSET, but for that of the member ''; nil if there is no other.
local function least_of(ring)
  local found = redis.call('ZRANGE', ring, 0, 1, 'WITHSCORES')
  return tonumber(found[found[1] == '' and 4 or 2])
end

-- Adds a tenant to a ring, without credit or penalty for its absence. Its counter is the smallest of the ring,
-- in an empty ring that of those who left; or, if that is higher and recent, the counter with which it left.
local function enter(ring, tenant)
  if redis.call('ZSCORE', ring, tenant) then return end
  local left = ring .. ':left'
  local least = least_of(ring)
  local start = least or least_of(left) or tonumber(redis.call('ZSCORE', left, '') or 0)
  local score = math.max(start, tonumber(redis.call('ZSCORE', left, tenant) or start))
  redis.call('ZREM', left, tenant)
  redis.call('ZADD', ring, string.format('%.17g', score), tenant)
  if least then
    redis.call('ZADD', left, 'GT', string.format('%.17g', start), '')
  else -- no tenant with a higher counter waits any more
    redis.call('ZADD', left, string.format('%.17g', start), '')
  end
  redis.call('PEXPIRE', left, LEFT_MS)
end

-- Removes a tenant from a ring. `left` keeps its counter while that is higher than the smallest of the ring.
local function leave(ring, tenant)
  local score = redis.call('ZSCORE', ring, tenant)
  if not score then return end
  redis.call('ZREM', ring, tenant)
  local least, left = least_of(ring), ring .. ':left'
  redis.call('ZADD', left, score, tenant)
  if least then
    local floor = redis.call('ZSCORE', left, '')
    redis.call('ZREMRANGEBYSCORE', left, '-inf', string.format('%.17g', least))
    if floor then redis.call('ZADD', left, floor, '') end
  end
  redis.call('PEXPIRE', left, LEFT_MS)
end

-- Adds a list with messages to its tenant's lists, and the tenant to the ring or to the capped tenants.
local function join(list)
  local queue, step, tenant = place_of(list)
  local ring = ring_of(queue, step)
  local lists = ring .. '\6' .. tenant
  if not redis.call('ZSCORE', lists, list) then
    local least = least_of(lists)
    redis.call('ZADD', lists, string.format('%.17g', least or 0), list)
    local batch = string.match(list, '\6\22%d\6[^\6]*\6(.+)$')
    local deadline = batch and redis.call('HGET', batch_key(batch), 'deadline')
    if deadline then
      redis.call('ZADD', turns_key(queue) .. ':deadlines', deadline, list)
      -- A worker of 0.2.0 leaves the marks of lists that it empties.
      redis.call('ZREMRANGEBYSCORE', turns_key(queue) .. ':deadlines', '-inf', now_ms() - 86400000)
    end
    if least then
      local key, field = turns_key(queue), 'floor:' .. step .. '\6' .. tenant
      local floor = math.max(least, tonumber(redis.call('HGET', key, field) or least))
      redis.call('HSET', key, field, string.format('%.17g', floor))
      redis.call('PEXPIRE', key, QUEUE_MS)
    end
  end
  if cap_left_of(queue, tenant) > 0 then
    enter(ring, tenant)
  elseif not redis.call('ZSCORE', ring, tenant) then
    redis.call('SADD', turns_key(queue) .. ':capped', step .. '\6' .. tenant)
  end
end

-- Removes an empty list from its tenant's lists, and a tenant without lists from the ring.
local function drop_list(list)
  local queue, step, tenant = place_of(list)
  local ring = ring_of(queue, step)
  local lists = ring .. '\6' .. tenant
  redis.call('ZREM', lists, list)
  redis.call('ZREM', turns_key(queue) .. ':deadlines', list)
  if redis.call('EXISTS', lists) == 0 then
    redis.call('HDEL', turns_key(queue), 'floor:' .. step .. '\6' .. tenant)
    leave(ring, tenant)
  end
end

-- Removes the list of a batch that is being deleted, with all its messages; with `queues`, the batch's field,
-- in each of these queues. A list that several batches use stays: delete_chunk.lua trims it.
local function remove_list(batch, list, queues)
  if not list or string.sub(list, -#batch - 1) ~= '\6' .. batch then return end
  for queue in string.gmatch(queues or (place_of(list)), '[^\n]+') do
    local own = list_in(queue, list)
    local waiting = redis.call('LLEN', own)
    redis.call('UNLINK', own)
    if waiting > 0 then add_to_queue(queue, 'waiting', -waiting) end
    drop_list(own)
  end
end

-- Returns the reason why no more may be queued, or nil: Redis uses more than `fraction` of its maxmemory; or,
-- without maxmemory, `most` messages wait in the queue of one of the lists (joined by newlines). If the list is
-- one of kombu's, only the messages in this list count.
local function why_full(lists, most, fraction)
  local memory = redis.call('INFO', 'memory')
  local used = tonumber(string.match(memory, 'used_memory:(%d+)'))
  local limit = tonumber(string.match(memory, 'maxmemory:(%d+)'))
  if limit > 0 then
    return used > limit * fraction and string.format('Redis uses %d of %d bytes', used, limit) or nil
  end
  for list in string.gmatch(lists, '[^\n]+') do
    local waiting = is_kombus(list) and redis.call('LLEN', list)
      or tonumber(redis.call('HGET', turns_key((place_of(list))), 'waiting') or 0)
    if waiting >= most then return string.format('%d requests wait in the queue', waiting) end
  end
  return nil
end

-- Counts messages that a script has added to a list, and gives the list its turns.
local function note_pushed(list, pushed)
  if pushed == 0 or string.find(list, ':suspects$') then return end
  if not is_kombus(list) then add_to_queue((place_of(list)), 'waiting', pushed) end
  join(list)
end

-- Appends messages, joined by newlines, to a list of the batch with this key; returns their number. Several
-- lists are joined by newlines, and an empty line ends the messages of each. `queues` is the batch's field of
-- this name; if the batch has the field, the lists' queues are added to it. The lists join the turns before
-- messages are pushed: if Redis's ACL forbids writes to the turns, the script ends without a push.
local function push_lines(lists, text, key, queues)
  if text == '' then return 0 end
  local all_queues = queues
  for list in string.gmatch(lists, '[^\n]+') do
    join(list)
    local queue = place_of(list)
    if queues and not string.find('\n' .. all_queues .. '\n', '\n' .. queue .. '\n', 1, true) then
      all_queues = (all_queues == '' and '' or all_queues .. '\n') .. queue
    end
  end
  if all_queues ~= queues then redis.call('HSET', key, 'queues', all_queues) end
  local total, at = 0, 1
  for list in string.gmatch(lists, '[^\n]+') do
    local pushed, lines = 0, {}
    local function push()
      redis.call('LPUSH', list, unpack(lines))
      pushed, lines = pushed + #lines, {}
    end
    while at <= #text do
      local stop = string.find(text, '\n', at, true) or #text + 1
      local line = string.sub(text, at, stop - 1)
      at = stop + 1
      if line == '' then break end
      lines[#lines + 1] = line
      if #lines == 1000 then push() end -- unpack() overflows Lua's stack at 8000 values
    end
    if #lines > 0 then push() end
    note_pushed(list, pushed)
    total = total + pushed
  end
  return total
end

-- Moves a tenant from the ring to the capped tenants: its next message needs more than its cap leaves.
local function cap_turns(queue, step, tenant)
  redis.call('SADD', turns_key(queue) .. ':capped', step .. '\6' .. tenant)
  leave(ring_of(queue, step), tenant)
end

-- Returns whether a tenant has a message at a higher priority that waits for its cap: a message at a lower
-- priority must not take the next free place.
local function waits_above(queue, step, tenant)
  for _, higher in ipairs({ '0', '3', '6' }) do
    if higher >= step then return false end
    local waits = redis.call('SISMEMBER', turns_key(queue) .. ':capped', higher .. '\6' .. tenant)
    if waits == 1 then return true end
  end
  return false
end

-- Gives a capped tenant its turns again, at the priorities at which it waits.
local function uncap(queue, tenant)
  local capped = turns_key(queue) .. ':capped'
  for _, step in ipairs({ '0', '3', '6', '9' }) do
    if redis.call('SREM', capped, step .. '\6' .. tenant) == 1 then
      local ring = ring_of(queue, step)
      if redis.call('EXISTS', ring .. '\6' .. tenant) == 1 then enter(ring, tenant) end
    end
  end
end

-- Adds `share` to the counter of a member of a ZSET; returns nil if there is no such member. A newcomer's
-- counter begins with charges that are estimates and may be refunded. So a refund lowers a counter to no less
-- than one turn (LONGEST_TURN requests that cost `each`) below the highest counter that a newcomer began with
-- (`floor()`). Without this limit, newcomers would wait until all that was refunded is used.
local function add_share(key, member, share, floor, each)
  local score = redis.call('ZADD', key, 'XX', 'INCR', string.format('%.17g', share), member)
  if not score or share >= 0 then return score end
  score = tonumber(score)
  local start = tonumber(floor() or nil)
  if not start or score >= start then return score end
  local lowest = math.min(score - share, start - LONGEST_TURN * each)
  if score < lowest then redis.call('ZADD', key, 'XX', string.format('%.17g', lowest), member) end
  return score
end

-- Charges a list and its tenant for requests that were leased (`ended` is nil), or corrects the charge of
-- requests whose leases ended. `sequences` is added to the tenant's sequences in flight. `tokens` is the
-- estimate; for ended leases the difference of used and estimated tokens. `ended` has `share`, that
-- difference divided by the tenant's weight at the time of the lease, and the mean cost of such a request:
-- `mean_used` in tokens, `mean_share` divided by the weight.
local function charge(list, sequences, tokens, ended)
  local queue, step, tenant = place_of(list)
  local ring = ring_of(queue, step)
  if sequences ~= 0 then
    local field = 'in_flight:' .. tenant
    if add_to_queue(queue, field, sequences) <= 0 then redis.call('HDEL', turns_key(queue), field) end
  end
  local share = ended and ended.share or tokens / (weight_and_cap_of(tenant))
  if tokens ~= 0 or share ~= 0 then
    local left = ring .. ':left'
    local mean_used, mean_share = ended and ended.mean_used or 0, ended and ended.mean_share or 0
    local function floor() return redis.call('ZSCORE', left, '') end
    if not add_share(ring, tenant, share, floor, mean_share) then
      add_share(left, tenant, share, floor, mean_share)
    end
    add_share(ring .. '\6' .. tenant, list, tokens, function()
      return redis.call('HGET', turns_key(queue), 'floor:' .. step .. '\6' .. tenant)
    end, mean_used)
  end
  if sequences < 0 then
    local _, cap = weight_and_cap_of(tenant)
    if cap and cap_left_of(queue, tenant) > 0 then uncap(queue, tenant) end
  end
end
