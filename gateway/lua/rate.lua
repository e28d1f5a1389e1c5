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
  -- In these tables index 1 is the bucket of requests, index 2 that of tokens.
  local limits = { tonumber(ARGV[i + 1]) or false, tonumber(ARGV[i + 2]) or false }
  local asked = { tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]) }
  local corrects = asked[1] == 0
  local requests, tokens, at = unpack(redis.call('HMGET', key, 'requests', 'tokens', 'at'))
  local stored, levels, wait = { requests, tokens }, {}, 0
  for n = 1, 2 do
    local limit = limits[n]
    if limit then
      levels[n] = level_of(limit, stored[n], at)
      if not corrects and asked[n] > levels[n] then
        if asked[n] > limit then wait = -1 end
        if wait >= 0 then wait = math.max(wait, ms_for(limit, asked[n] - levels[n])) end
      end
    end
  end
  local allowed, left, full_ms = wait == 0, { 0, 0 }, { 0, 0 }
  for n = 1, 2 do
    local limit = limits[n]
    if limit then
      if allowed then levels[n] = math.min(limit, levels[n] - asked[n]) end
      left[n], full_ms[n] = math.max(0, math.floor(levels[n])), ms_for(limit, limit - levels[n])
    end
  end
  if allowed then
    for n, name in ipairs({ 'requests', 'tokens' }) do
      if limits[n] then redis.call('HSET', key, name, string.format('%.3f', levels[n])) end
    end
    redis.call('HSET', key, 'at', now)
    -- A missing bucket counts as full, so it may expire when it is full.
    redis.call('PEXPIRE', key, math.max(full_ms[1], full_ms[2]) + 1000)
  end
  out[#out + 1] = { allowed and 1 or 0, left[1], full_ms[1], left[2], full_ms[2], wait }
end
return out
