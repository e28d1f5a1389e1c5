-- OBJECT_PUT: write one of the gateways' objects, if it is at the version that the writer has read.
-- ARGV: kind, id, owner, version ('0' for a new one), created (s), document (JSON), expires_at (s since
--   1970, '' for never), then perhaps: id and version of a batch that must still be at that version
-- Touches: warmq:gateway:<kind>:<id>, warmq:gateway:<kind>s:<owner>, warmq:gateway:records,
--   warmq:gateway:records:<owner>
-- Returns: the new version; 0 if the object has another version, or is there although new or gone
--   although not; or if the batch has another version
local kind, id, owner = ARGV[1], ARGV[2], ARGV[3]
-- Where Redis is full, existing objects can end, and an ending batch gets its files; nothing else begins.
if ARGV[4] ~= '0' or kind == 'file' then unblock() end
if ARGV[8] and redis.call('HGET', 'warmq:gateway:batch:' .. ARGV[8], 'version') ~= ARGV[9] then return 0 end
local key = 'warmq:gateway:' .. kind .. ':' .. id
local found = redis.call('HMGET', key, 'version', 'owner')
if (found[1] or '0') ~= ARGV[4] or (found[2] and found[2] ~= owner) then return 0 end
local version = tonumber(ARGV[4]) + 1
redis.call('HSET', key, 'version', version, 'owner', owner, 'created', ARGV[5], 'document', ARGV[6])
if ARGV[7] ~= '' then
  redis.call('EXPIREAT', key, ARGV[7])
else
  redis.call('PERSIST', key)
end
-- Equal scores are sorted by name: a list is in order of creation, then of id. A batch of Anthropic's API
-- is listed as `message_batch` alone, so that no list reads past those of another.
if version == 1 and not (kind == 'batch' and string.find(id, '^msgbatch_')) then
  redis.call('ZADD', 'warmq:gateway:' .. kind .. 's:' .. owner, ARGV[5], id)
end
count_record(owner, kind .. ':' .. id, #ARGV[6] + RECORD_BYTES)
return version
