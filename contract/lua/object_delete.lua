-- OBJECT_DELETE: remove one of the gateways' objects. A batch of Anthropic's API is two objects, of the kinds
-- batch and message_batch: both are removed.
-- ARGV: kind, id, owner
-- Touches: warmq:gateway:<kind>:<id>, warmq:gateway:<kind>s:<owner>, warmq:gateway:records,
--   warmq:gateway:records:<owner>
-- Returns: 1; 0 if the owner has no such object
allow_when_full()
local kind, id, owner = ARGV[1], ARGV[2], ARGV[3]
local function remove(of_kind)
  local key = 'warmq:gateway:' .. of_kind .. ':' .. id
  redis.call('ZREM', 'warmq:gateway:' .. of_kind .. 's:' .. owner, id)
  if redis.call('HGET', key, 'owner') ~= owner then return 0 end
  count_record(owner, of_kind .. ':' .. id, 0)
  return redis.call('DEL', key)
end
if kind == 'batch' and string.find(id, '^msgbatch_') then remove('message_batch') end
return remove(kind)
