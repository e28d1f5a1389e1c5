-- RATE: take requests and tokens from the buckets of keys, which refill within a minute.
-- ARGV: for each: key id, requests a minute ('' for no limit), tokens a minute ('' for no limit),
--   requests to take, tokens to take (negative: give back). With 0 requests the tokens correct the estimate
--   of an ended request; this is never refused.
-- Touches: warmq:gateway:rate:<key id>
-- Returns: for each: {1, or 0 if refused, requests left, ms until their bucket is full, tokens left, ms
--   until their bucket is full, ms until the take would be allowed (-1: never)}
allow_when_full()
local now = now_ms()
local out = {}

-- Returns the level of a bucket now.
local function level_of(limit, level, at)
  local passed = math.max(0, now - (tonumber(at) or now)) -- the clock may have stepped back
  return math.min(limit, (tonumber(level) or limit) + passed * limit / 60000)
end

-- Returns the ms until a bucket has `missing` more.
local function ms_for(limit, missing)
  return math.max(0, math.ceil(missing * 60000 / limit))
end

for i = 1, #ARGV, 5 do
  local key = 'warmq:gateway:rate:' .. ARGV[i]
  local limits = { tonumber(ARGV[i + 1]) or false, tonumber(ARGV[i + 2]) or false }
  local asked = { tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]) }
  local corrects = asked[1] == 0
  local was = redis.call('HMGET', key, 'requests', 'tokens', 'at')
  local levels, wait = {}, 0
  for n = 1, 2 do
    local limit = limits[n]
    if limit then
      levels[n] = level_of(limit, was[n], was[3])
      if not corrects and asked[n] > levels[n] then
        if asked[n] > limit then wait = -1 end
        if wait >= 0 then wait = math.max(wait, ms_for(limit, asked[n] - levels[n])) end
      end
    end
  end
  local row, full = { wait == 0 and 1 or 0 }, 0
  for n = 1, 2 do
    local limit = limits[n]
    if limit then
      if wait == 0 then levels[n] = math.min(limit, levels[n] - asked[n]) end
      local until_full = ms_for(limit, limit - levels[n])
      full = math.max(full, until_full)
      row[n * 2], row[n * 2 + 1] = math.max(0, math.floor(levels[n])), until_full
    else
      row[n * 2], row[n * 2 + 1] = 0, 0
    end
  end
  row[6] = wait
  if wait == 0 then
    for n, name in ipairs({ 'requests', 'tokens' }) do
      if limits[n] then redis.call('HSET', key, name, string.format('%.3f', levels[n])) end
    end
    redis.call('HSET', key, 'at', now)
    -- A missing bucket counts as full, so it may expire when it is full.
    redis.call('PEXPIRE', key, full + 1000)
  end
  out[#out + 1] = row
end
return out
