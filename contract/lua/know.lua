-- KNOW: note which results are known answers, for `submit --reuse`. The entries of a tenant are in two halves; when
-- the newer one is full, it becomes the older one. So the least recently written or used entries go first.
-- ARGV: tenant, most entries, time to live in ms, entries joined by newlines: digest, hash of the body, request id
-- Touches: warmq:known:<tenant>:{new,old} and :bits of both
-- Returns: number of entries in the newer half
local HASH_BITS = 32 -- bits of the filter for each entry: one body in 32 that is not known passes it
local known = 'warmq:known:' .. ARGV[1]
local new, old = known .. ':new', known .. ':old'
local half, ttl_ms = math.max(1, math.floor(tonumber(ARGV[2]) / 2)), tonumber(ARGV[3])

-- Returns the number of bits of a new filter: a power of two, from 1 KiB.
local function filter_size()
  local size = 8192
  while size < HASH_BITS * half do size = size * 2 end
  return size
end

local count, size = redis.call('HLEN', new), redis.call('STRLEN', new .. ':bits') * 8
for digest, hash, id in string.gmatch(ARGV[4], '(%x+) (%d+) ([^\n]+)') do
  if count >= half then
    redis.call('UNLINK', old, old .. ':bits')
    redis.call('RENAME', new, old)
    if size > 0 then redis.call('RENAME', new .. ':bits', old .. ':bits') end
    count, size = 0, 0
  end
  if size == 0 then
    size = filter_size()
    redis.call('SETBIT', new .. ':bits', size - 1, 0) -- the filter has its whole length from the start
  end
  count = count + redis.call('HSET', new, digest, id)
  redis.call('SETBIT', new .. ':bits', tonumber(hash) % size, 1)
end
redis.call('PEXPIRE', new, ttl_ms)
redis.call('PEXPIRE', new .. ':bits', ttl_ms)
return count
