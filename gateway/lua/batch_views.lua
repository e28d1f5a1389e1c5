-- BATCH_VIEWS: read one of a tenant's batches, or a page of them, newest first. These are batches made over
-- HTTP, with the counters of their queue batches while they run, and batches of `producer submit`.
-- For a page the script first adds new batches of `producer submit` to their tenants' lists, in the order of
-- their creation and at most AT_ONCE in a call. No other script adds them, because only gateways need these lists.
-- ARGV: tenant ('' for all: the gateway has no keys), id of one batch ('' for a page), id after which the page
--   begins ('' for the newest), most batches, place in the list to continue from ('' for the page's beginning)
-- Touches: warmq:gateway:batch:<id>, warmq:gateway:batchs:<owner>, warmq:gateway:listed_until,
--   warmq:gateway:listed_until:all, warmq:gateway:records, warmq:gateway:records:<owner>, warmq:batches, warmq:batch:<id>
-- Returns: {answer, place in the list, batch, batch, ...}. The answer is 0; 1 if more batches follow; -1
--   if the tenant has no such id; 2 if more batches must be added to the lists: call again; 3 if EXAMINE
--   entries were read: call again with the place, for the rest of the page. A batch is {id, document,
--   version, counters of each queue batch (COUNTERS)} or, of `producer submit`, {id, '', '0', {field, value,
--   ...}}. If Redis refuses writes, the script only reads.
local owner, wanted, after, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local OBJECT, LIST, UNTIL = 'warmq:gateway:batch:', 'warmq:gateway:batchs:', 'warmq:gateway:listed_until'
-- Without API keys all batches are in the list of the tenant 'default'. Once there are API keys, `view` refuses the
-- batches of other tenants, and a read of the list removes them.
local all = owner == ''
if all then owner, UNTIL = 'default', UNTIL .. ':all' end
-- Most batches of `producer submit` and most entries of a list that one call reads; ids of message batches.
local AT_ONCE, EXAMINE, HIDDEN = 250, 1000, '^msgbatch_'
local writes = may_write()
local COUNTERS = { 'total', 'completed', 'failed', 'cancelled', 'expired', 'prompt_tokens',
                   'completion_tokens', 'sealed', 'finished_at', 'created_at', 'expected', 'failures',
                   'cut', 'reason', 'cached' }
local ENDED = { completed = true, failed = true, expired = true, cancelled = true }

-- Returns fields of a hash; none if the key is not a hash: a caller's id may name any key.
local function fields(key, ...)
  local found = redis.pcall('HMGET', key, ...)
  return found.err and {} or found
end

-- Returns whether this id is that of a queue batch.
local function is_part(id)
  local whole = string.match(id, '^(.+)%.%d+$')
  return whole ~= nil and redis.call('EXISTS', OBJECT .. whole) == 1
end

-- Returns the view of a batch made over HTTP.
local function made_over_http(id, document, version)
  local out = { id, document, version }
  -- Quotes within a JSON text are escaped, so a match is not within one.
  if string.find(document, '"parts":[{"', 1, true) then
    local record = cjson.decode(document)
    if not ENDED[record.status or 'validating'] then
      for _, part in ipairs(record.parts) do
        out[#out + 1] = fields(batch_key(part.batch_id), unpack(COUNTERS))
      end
    end
  end
  return out
end

-- Returns the view of a batch; nil if the tenant has no such batch.
local function view(id)
  local record_owner, document, version = unpack(fields(OBJECT .. id, 'owner', 'document', 'version'), 1, 3)
  if record_owner then
    return (all or record_owner == owner) and made_over_http(id, document, version) or nil
  end
  local created_at, tenant, deleting = unpack(fields(batch_key(id), 'created_at', 'tenant', 'deleting'), 1, 3)
  local of_other = not all and (tenant or 'default') ~= owner
  if not created_at or deleting or of_other or is_part(id) then return nil end
  return { id, '', '0', redis.call('HGETALL', batch_key(id)) }
end

if wanted ~= '' then
  local found = view(wanted)
  return found and { 0, 0, found } or { -1, 0 }
end

-- Adds batches of `producer submit` to their tenants' lists; returns whether there may be more.
local function list_submitted()
  local noted, now = tonumber(redis.call('GET', UNTIL) or 0), now_ms()
  local from = noted > now and 0 or noted -- 0 if Redis's clock has stepped back: new batches have earlier times
  local ids = redis.call('ZRANGEBYSCORE', 'warmq:batches', from, '+inf', 'WITHSCORES', 'LIMIT', 0, AT_ONCE)
  for i = 1, #ids, 2 do
    local id, at = ids[i], tonumber(ids[i + 1])
    if redis.call('EXISTS', OBJECT .. id) == 0 and not is_part(id) then
      local created_at, tenant = unpack(fields(batch_key(id), 'created_at', 'tenant'), 1, 2)
      if created_at then
        local list = LIST .. (all and owner or tenant or 'default')
        if not redis.call('ZSCORE', list, id) then
          redis.call('ZADD', list, math.floor(at / 1000), id)
          -- Expired batches are also removed from lists that nobody reads.
          for _, old in ipairs(redis.call('ZRANGE', list, 0, 1)) do
            if redis.call('EXISTS', OBJECT .. old, batch_key(old)) == 0 then redis.call('ZREM', list, old) end
          end
        end
      end
    end
    from = at
  end
  if from ~= noted then redis.call('SET', UNTIL, string.format('%.0f', from)) end
  return #ids == 2 * AT_ONCE
end

if writes and list_submitted() then return { 2, 0 } end
local list, first = LIST .. owner, tonumber(ARGV[5])
if not first then
  first = 0
  if after ~= '' then
    local at = not string.find(after, HIDDEN) and redis.call('ZREVRANK', list, after)
    if not at then return { -1, 0 } end
    first = at + 1
  end
end
local shown, gone, hidden, answer, step, examined = {}, {}, {}, 0, math.max(most, 50), 0

-- Adds a batch to the page; returns whether the page was full already.
local function take(id)
  if string.find(id, HIDDEN) then
    hidden[#hidden + 1] = id
    return false
  end
  local batch = view(id)
  if not batch then gone[#gone + 1] = id end
  if not batch or #shown < most then
    shown[#shown + 1] = batch
    return false
  end
  return true
end

while answer == 0 do
  local ids = redis.call('ZREVRANGE', list, first, first + step)
  for _, id in ipairs(ids) do
    first = first + 1
    if take(id) then
      answer = 1
      break
    end
  end
  examined = examined + #ids
  if #ids <= step then break end
  if answer == 0 and examined >= EXAMINE then answer = 3 end
end
if writes then
  for _, id in ipairs(gone) do
    if redis.call('ZREM', list, id) == 1 then first = first - 1 end
    count_record(owner, 'batch:' .. id, 0)
  end
  call_many('ZREM', list, hidden) -- earlier releases wrote these; message batches have their own list
  first = first - #hidden
end
return { answer, first, unpack(shown) }
