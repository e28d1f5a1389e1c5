-- KNOW: note which results are known answers, for `submit --reuse`. The entries of a tenant are in two halves; when
-- the newer one is full, it becomes the older one. So the least recently written or used entries go first.
-- ARGV: tenant, most entries, time to live in ms, entries joined by newlines: digest, hash of the body, request id
-- Touches: warmq:known:<tenant>:{new,old} and :bits of both
-- Returns: number of entries in the newer half
local HASH_BITS = 32 -- bits of the filter for each entry, of which two are set: few unknown bodies pass it
local AT_ONCE = 250 -- most entries of one command
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
local entries, bits = {}, {} -- arguments of HSET and BITFIELD that are not written yet

local function write()
  if #entries == 0 then return end
  count = count + redis.call('HSET', new, unpack(entries))
  redis.call('BITFIELD', new .. ':bits', unpack(bits))
  entries, bits = {}, {}
end

local function set_bit(number)
  local n = #bits
  bits[n + 1], bits[n + 2], bits[n + 3], bits[n + 4] = 'SET', 'u1', number % size, 1
end

for digest, hash, id in string.gmatch(ARGV[4], '(%x+) (%d+) ([^\n]+)') do
  local pending = #entries / 2
  if pending >= AT_ONCE or count + pending >= half then write() end
  if count >= half then
    redis.call('UNLINK', old, old .. ':bits')
    redis.call('RENAME', new, old)
    if size > 0 then redis.call('RENAME', new .. ':bits', old .. ':bits') end
    count, size = 0, 0
  end
  if size == 0 then
    size = filter_size()
    redis.call('BITFIELD', new .. ':bits', 'SET', 'u1', size - 1, 0) -- the whole length from the start
  end
  entries[#entries + 1], entries[#entries + 2] = digest, id
  hash = tonumber(hash)
  set_bit(hash)
  set_bit(math.floor(hash / 65536) + hash % 65536 * 65536) -- the halves of its 32 bits exchanged
end
write()
redis.call('PEXPIRE', new, ttl_ms)
redis.call('PEXPIRE', new .. ':bits', ttl_ms)
return count
