-- Turns of tenants: virtual token counters (Sheng et al., "Fairness in Serving Large Language
-- Models", OSDI 2024). Each queue and priority has one ZSET of the tenants that have messages
-- (tenant -> tokens served, divided by the tenant's weight), and each of these one of its lists
-- (list key -> tokens served). POP serves the smallest counter, at both. Keys:
--   <queue>\6\22<step>\6<tenant>\6<batch>  messages of one batch; no <batch>: of all batches that
--                                          keep the order in which they came (`--turn fifo`)
--   <queue>, <queue>\6\22<step>            kombu's lists: messages of the tenant `celery`
--   warmq:turns:<queue>\6<step>            the ring: tenants that have messages and are not capped
--   warmq:turns:<queue>\6<step>\6<tenant>  the lists of one tenant that have messages
--   warmq:turns:<queue>\6<step>:left       tenants without messages that were served more than
--                                          those that have some: they come back with that counter;
--                                          '' -> the highest counter that a newcomer was given
--   warmq:turns:<queue>                    hash: `waiting`, messages in all lists but kombu's;
--                                          `mean`, tokens of a request; `in_flight:<tenant>`, sequences;
--                                          `floor:<step>\6<tenant>`, the highest counter that one of
--                                          its lists was given; while it has lists
--   warmq:turns:<queue>:capped             <step>\6<tenant>: has messages, but as many in flight
--                                          as its cap allows
--   warmq:used:<queue>:<hour>              hash: tenant -> tokens of its answered requests in this hour
--                                          since 1970, for people; three hours
--   warmq:tenants                          hash: tenant -> weight NUL cap ('' for none)
local CELERY = 'celery'
-- Tokens of an answer of unknown length, and bytes of text a token.
local UNKNOWN_ANSWER, BYTES_A_TOKEN = 64, 4
-- Most text tokens of a request without a mean where the model's context is unknown, and the tokens of a picture,
-- whatever the size of its file.
local UNKNOWN_TEXT, MEDIUM_TOKENS = 16384, 1024
-- Most tokens that one request is charged even if a server reports more; and the charge of a request that its
-- author must change: it took a place in a worker, and time to be read.
local MOST_COST, REJECTION = 2 ^ 20, 16
-- Life in ms of a tenant without messages, and of a queue that nobody uses.
local LEFT_MS, QUEUE_MS = 600000, 7 * 86400000
-- Requests of a turn, at most.
local LONGEST_TURN = 32
-- Requests over which the queue's mean forgets.
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

-- Queue, step and tenant of a list of waiting messages, parsed once: scripts need them for every message.
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

local function is_kombus(list) return not string.find(list, '\6\22%d\6') end

-- The list of a tenant's messages that have no batch; `step` is the suffix of a priority's list.
local function tenant_list(queue, step, tenant)
  return queue .. (step == '' and '\6\0220' or step) .. '\6' .. tenant .. '\6'
end

-- Weight and cap of a tenant; a cap of nil is none.
local any_tenants
local known_terms = {}
local function terms_of(tenant)
  if any_tenants == nil then any_tenants = redis.call('EXISTS', 'warmq:tenants') == 1 end
  if not any_tenants then return 1, nil end
  local terms = known_terms[tenant]
  if not terms then
    terms = redis.call('HGET', 'warmq:tenants', tenant) or ''
    known_terms[tenant] = terms
  end
  local weight, cap = string.match(terms, '^([%d.]+)%z(%d*)$')
  return tonumber(weight) or 1, tonumber(cap)
end

-- Sequences of a tenant in flight.
local function in_flight_of(queue, tenant)
  return tonumber(redis.call('HGET', turns_key(queue), 'in_flight:' .. tenant) or 0)
end

local function cap_left_of(queue, tenant)
  local _, cap = terms_of(tenant)
  return cap and cap - in_flight_of(queue, tenant) or math.huge
end

local function least_of(ring)
  return tonumber(redis.call('ZRANGE', ring, 0, 0, 'WITHSCORES')[2])
end

-- A tenant that comes back has neither credit nor penalty for its absence: it begins with the smallest
-- counter, or with its own if that is higher and recent.
local function enter(ring, tenant)
  if redis.call('ZSCORE', ring, tenant) then return end
  local left = ring .. ':left'
  local least = least_of(ring)
  local given = least or least_of(left) or 0
  local score = math.max(given, tonumber(redis.call('ZSCORE', left, tenant) or given))
  redis.call('ZREM', left, tenant)
  redis.call('ZADD', ring, string.format('%.17g', score), tenant)
  if least then
    redis.call('ZADD', left, 'GT', string.format('%.17g', given), '')
  else -- nobody with a higher counter waits any more
    redis.call('ZADD', left, string.format('%.17g', given), '')
  end
  redis.call('PEXPIRE', left, LEFT_MS)
end

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

-- Gives a list with messages its turns.
local function join(list)
  local queue, step, tenant = place_of(list)
  local ring = ring_of(queue, step)
  local lists = ring .. '\6' .. tenant
  if not redis.call('ZSCORE', lists, list) then
    local least = least_of(lists)
    redis.call('ZADD', lists, string.format('%.17g', least or 0), list)
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

local function drop_list(list)
  local queue, step, tenant = place_of(list)
  local ring = ring_of(queue, step)
  local lists = ring .. '\6' .. tenant
  redis.call('ZREM', lists, list)
  if redis.call('EXISTS', lists) == 0 then
    redis.call('HDEL', turns_key(queue), 'floor:' .. step .. '\6' .. tenant)
    leave(ring, tenant)
  end
end

-- Removes the list that is a batch's alone, of any length, and its turns: the batch is gone or being
-- deleted.
local function remove_list(batch, list)
  if not list or string.sub(list, -#batch - 1) ~= '\6' .. batch then return end
  local waiting = redis.call('LLEN', list)
  redis.call('UNLINK', list)
  if waiting > 0 then add_to_queue((place_of(list)), 'waiting', -waiting) end
  drop_list(list)
end

-- The reason why no more may be queued, or nil: Redis uses more than a fraction of its maxmemory or,
-- without one, too many messages wait. Of kombu's lists only their own are counted.
local function why_full(list, most, fraction)
  local memory = redis.call('INFO', 'memory')
  local used = tonumber(string.match(memory, 'used_memory:(%d+)'))
  local limit = tonumber(string.match(memory, 'maxmemory:(%d+)'))
  if limit > 0 then
    return used > limit * fraction and string.format('Redis uses %d of %d bytes', used, limit) or nil
  end
  local waiting = is_kombus(list) and redis.call('LLEN', list)
    or tonumber(redis.call('HGET', turns_key((place_of(list))), 'waiting') or 0)
  return waiting >= most and string.format('%d requests wait in the queue', waiting) or nil
end

-- Notes that messages were added to the end or the head of a list.
local function note_pushed(list, pushed)
  if pushed == 0 or string.find(list, ':suspects$') then return end
  if not is_kombus(list) then add_to_queue((place_of(list)), 'waiting', pushed) end
  join(list)
end

-- Appends messages, joined by newlines, to a list; returns how many. The turn comes first: a producer's
-- user that may not change turns must not have pushed anything.
local function push_lines(list, text)
  if text == '' then return 0 end
  join(list)
  local pushed, found, at = 0, {}, 1
  local function push()
    redis.call('LPUSH', list, unpack(found))
    pushed, found = pushed + #found, {}
  end
  while at <= #text do
    local stop = string.find(text, '\n', at, true) or #text + 1
    found[#found + 1] = string.sub(text, at, stop - 1)
    if #found == 1000 then push() end -- unpack() overflows Lua's stack at 8000 values
    at = stop + 1
  end
  if #found > 0 then push() end
  note_pushed(list, pushed)
  return pushed
end

-- Resets the count of waiting messages when none was found: somebody may have removed a list.
local function forget_waiting(queue)
  if redis.call('EXISTS', turns_key(queue) .. ':capped') == 0 then
    redis.call('HDEL', turns_key(queue), 'waiting')
  end
end

-- Takes a tenant out of the ring whose next message needs more than its cap leaves.
local function cap_turns(queue, step, tenant)
  redis.call('SADD', turns_key(queue) .. ':capped', step .. '\6' .. tenant)
  leave(ring_of(queue, step), tenant)
end

-- Whether a tenant has a message at a higher priority that waits for its cap: a lower one must not take the
-- cap's next slot.
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

-- Adds to a counter of a ZSET; nil if it is not there. Newcomers' counters include charges that may prove
-- too high: a refund leaves its tenant at most a turn below that (`floor` returns it; `each` is what a
-- request cost that now ends), else the newcomers would wait for all that was refunded.
local function add_share(key, member, share, floor, each)
  local score = redis.call('ZADD', key, 'XX', 'INCR', string.format('%.17g', share), member)
  if not score or share >= 0 then return score end
  score = tonumber(score)
  local given = tonumber(floor() or nil)
  if not given or score >= given then return score end
  local lowest = math.min(score - share, given - LONGEST_TURN * each)
  if score < lowest then redis.call('ZADD', key, 'XX', string.format('%.17g', lowest), member) end
  return score
end

-- Charges a list for requests that were leased or have returned, and counts their sequences: `tokens` is
-- the estimate, later the difference to the used tokens. `ended` is for returned ones: `share`, the same
-- divided by the tenant's weight when they were charged, and the cost of one of them, `each` in tokens and
-- `each_share` divided so.
local function charge(list, sequences, tokens, ended)
  local queue, step, tenant = place_of(list)
  local ring = ring_of(queue, step)
  if sequences ~= 0 then
    local field = 'in_flight:' .. tenant
    if add_to_queue(queue, field, sequences) <= 0 then redis.call('HDEL', turns_key(queue), field) end
  end
  local share = ended and ended.share or tokens / (terms_of(tenant))
  if tokens ~= 0 or share ~= 0 then
    local left = ring .. ':left'
    local each, each_share = ended and ended.each or 0, ended and ended.each_share or 0
    local function floor() return redis.call('ZSCORE', left, '') end
    if not add_share(ring, tenant, share, floor, each_share) then
      add_share(left, tenant, share, floor, each_share)
    end
    add_share(ring .. '\6' .. tenant, list, tokens, function()
      return redis.call('HGET', turns_key(queue), 'floor:' .. step .. '\6' .. tenant)
    end, each)
  end
  if sequences < 0 then
    local _, cap = terms_of(tenant)
    if cap and cap_left_of(queue, tenant) > 0 then uncap(queue, tenant) end
  end
end
