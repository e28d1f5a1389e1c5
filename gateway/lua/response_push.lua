-- RESPONSE_PUSH: queue the request of a background response, once: not if it was queued before, is cancelled or
-- is deleted.
-- ARGV: id, list key, message, most waiting messages, most fraction of maxmemory (why_full)
-- Touches: warmq:gateway:response:<id>, the list key, warmq:turns:*
-- Returns: 1 (queued now), 0 (not to be queued), or the reason why the queue is full
local key, list = 'warmq:gateway:response:' .. ARGV[1], ARGV[2]
local owner, pushed, cancelled = unpack(redis.call('HMGET', key, 'owner', 'pushed', 'cancelled'))
if not owner or pushed or cancelled then return 0 end
local full = why_full(list, tonumber(ARGV[4]), tonumber(ARGV[5]))
if full then return full end
allow_when_full() -- the two limits decide whether the queue is full, not maxmemory
join(list) -- first: if Redis's ACL forbids writes to the turns, the script ends before it pushes
redis.call('LPUSH', list, ARGV[3])
redis.call('HSET', key, 'pushed', now_ms())
note_pushed(list, 1)
return 1
