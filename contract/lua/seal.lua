-- SEAL: no more lines will come; COMPLETE is tested.
-- ARGV: batch, created, cursor, digest, reason (why the batch is `failed`, or '')
-- Touches: warmq:batch:<id>, warmq:retiring
-- Returns: {'ok'} | {'gone'} | {'sealed', cursor, digest} | {'moved', cursor, digest}
local batch, key = ARGV[1], batch_key(ARGV[1])
unblock()
local state = redis.call('HMGET', key, 'created_at', 'sealed', 'cursor', 'digest')
if state[1] ~= ARGV[2] then return { 'gone' } end
if state[2] then return { 'sealed', state[3], state[4] } end
if state[3] ~= ARGV[3] or state[4] ~= ARGV[4] then return { 'moved', state[3], state[4] } end
redis.call('HSET', key, 'sealed', 1)
if ARGV[5] ~= '' then redis.call('HSET', key, 'reason', ARGV[5]) end
touched[batch] = true
complete_touched(now_ms())
return { 'ok' }
