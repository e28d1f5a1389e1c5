-- OBJECT_PUT: write one of the gateways' objects, if it still has the version that the writer has read.
-- ARGV: kind, id, owner, version ('0' for a new object), created (s), document (JSON), expires_at (s since
--   1970, '' for never), and optionally id and version of a batch that must still have that version
-- Touches: warmq:gateway:<kind>:<id>, warmq:gateway:<kind>s:<owner>, warmq:gateway:records,
--   warmq:gateway:records:<owner>
-- Returns: the new version; 0 if nothing was written, because the object or the batch has another version, a new
--   object exists already, or the object is gone
local kind, id, owner = ARGV[1], ARGV[2], ARGV[3]
-- While Redis is full, existing objects can change and end, and batches get their output files; no other new
-- object is written.
if ARGV[4] ~= '0' or kind == 'file' then allow_when_full() end
if ARGV[8] and redis.call('HGET', 'warmq:gateway:batch:' .. ARGV[8], 'version') ~= ARGV[9] then return 0 end
local key = 'warmq:gateway:' .. kind .. ':' .. id
local stored_version, stored_owner = unpack(redis.call('HMGET', key, 'version', 'owner'))
if (stored_version or '0') ~= ARGV[4] or (stored_owner and stored_owner ~= owner) then return 0 end
local version = tonumber(ARGV[4]) + 1
redis.call('HSET', key, 'version', version, 'owner', owner, 'created', ARGV[5], 'document', ARGV[6])
if ARGV[7] ~= '' then
  redis.call('EXPIREAT', key, ARGV[7])
else
  redis.call('PERSIST', key)
end
-- A ZSET sorts equal scores by name, so a list is in order of creation, then of id. A batch of Anthropic's API
-- is in the list of message batches only, so that readers of the list of batches need not skip it.
if version == 1 and not (kind == 'batch' and string.find(id, '^msgbatch_')) then
  redis.call('ZADD', 'warmq:gateway:' .. kind .. 's:' .. owner, ARGV[5], id)
end
count_record(owner, kind .. ':' .. id, #ARGV[6] + RECORD_BYTES)
return version
