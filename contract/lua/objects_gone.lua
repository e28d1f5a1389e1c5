-- OBJECTS_GONE: remove objects that have expired from their owner's lists and counted bytes.
-- ARGV: owner, then for each object: kind, id (at most 250 objects a call)
-- Touches: warmq:gateway:<kind>:<id>, warmq:gateway:<kind>s:<owner>, warmq:gateway:records,
--   warmq:gateway:records:<owner>
-- Returns: how many of the objects have expired
allow_when_full()
local owner, gone = ARGV[1], 0
for i = 2, #ARGV, 2 do
  local kind, id = ARGV[i], ARGV[i + 1]
  if redis.call('EXISTS', 'warmq:gateway:' .. kind .. ':' .. id) == 0 then
    redis.call('ZREM', 'warmq:gateway:' .. kind .. 's:' .. owner, id)
    count_record(owner, kind .. ':' .. id, 0)
    gone = gone + 1
  end
end
return gone
