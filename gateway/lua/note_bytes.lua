-- NOTE_BYTES: count the bytes of a tenant's file, replacing the bytes that were counted for it before.
-- ARGV: tenant ('' for the one for which the file is counted), file id, bytes (0 for a deleted file), most bytes
--   of the tenant ('' for no limit)
-- Touches: warmq:gateway:stored, warmq:gateway:stored:<tenant>, warmq:gateway:stored-by
-- Returns: {1, bytes of all its files}; {0, bytes of its other files} if the limit is exceeded: then
--   nothing changed
allow_when_full()
local tenant, file, bytes, limit = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if tenant == '' then
  tenant = redis.call('HGET', 'warmq:gateway:stored-by', file)
  if not tenant then return { 1, 0 } end
end
local sums, files = 'warmq:gateway:stored', 'warmq:gateway:stored:' .. tenant
-- The value is 'bytes time'. It has the time because a file may be created a little after this count.
local before = tonumber(string.match(redis.call('HGET', files, file) or '0', '^%d+'))
local rest = tonumber(redis.call('HGET', sums, tenant) or 0) - before
if limit and bytes > 0 and rest + bytes > limit then return { 0, rest } end
if bytes > 0 then
  redis.call('HSET', files, file, string.format('%d %d', bytes, now_ms()))
  redis.call('HSET', 'warmq:gateway:stored-by', file, tenant)
else
  redis.call('HDEL', files, file)
  redis.call('HDEL', 'warmq:gateway:stored-by', file)
end
local sum = redis.call('HINCRBY', sums, tenant, string.format('%d', bytes - before))
if sum <= 0 then redis.call('HDEL', sums, tenant) end
return { 1, sum }
