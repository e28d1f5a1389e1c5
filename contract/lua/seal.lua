-- SEAL: mark a batch as completely submitted, and finish it if it has no open line.
-- ARGV: batch, life, cursor, digest, reason (why the batch is `failed`, or ''),
--   expected (JSON of what the submit expects of the batch, or '')
-- Touches: warmq:batch:<id>, warmq:retiring
-- Returns: {'ok'} | {'gone'} | {'sealed', cursor, digest} | {'moved', cursor, digest}
--   | {'at', position}: messages are missing behind there (ENQUEUE_PLANNED)
local batch, key = ARGV[1], batch_key(ARGV[1])
unblock()
if not batch_alive(batch, ARGV[2]) then return { 'gone' } end
local state = redis.call('HMGET', key, 'sealed', 'cursor', 'digest', 'planned', 'announced')
if state[1] then return { 'sealed', state[2], state[3] } end
if state[2] ~= ARGV[3] or state[3] ~= ARGV[4] then return { 'moved', state[2], state[3] } end
if tonumber(state[4] or 0) < tonumber(state[5] or 0) then return { 'at', state[4] } end
redis.call('HSET', key, 'sealed', 1)
if ARGV[5] ~= '' then redis.call('HSET', key, 'reason', ARGV[5]) end
if (ARGV[6] or '') ~= '' then redis.call('HSET', key, 'expected', ARGV[6]) end
batch_state(batch).touched = true
apply_to_batches(now_ms())
return { 'ok' }
