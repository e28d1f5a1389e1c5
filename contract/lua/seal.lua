-- SEAL: mark a batch as completely submitted, and finish it if all its requests have ended.
-- ARGV: batch, life, cursor and digest of the file's end, why the batch is `failed` ('' if it is not), what the
--   submit expects of the batch (JSON, or '')
-- Touches: warmq:batch:<id>, warmq:retiring, warmq:gateway:due:notify
-- Returns: {'ok'} | {'gone'} | {'sealed' or 'moved', cursor, digest} of the batch | {'at', number of messages
--   that the batch has}, if ENQUEUE_PLANNED must append more
local batch, key = ARGV[1], batch_key(ARGV[1])
allow_when_full()
if not batch_alive(batch, ARGV[2]) then return { 'gone' } end
local sealed, cursor, digest, planned, announced, stopped =
  unpack(redis.call('HMGET', key, 'sealed', 'cursor', 'digest', 'planned', 'announced', 'stopped'))
if sealed then return { 'sealed', cursor, digest } end
if cursor ~= ARGV[3] or digest ~= ARGV[4] then return { 'moved', cursor, digest } end
if tonumber(planned or 0) < tonumber(announced or 0) then return { 'at', planned } end
redis.call('HSET', key, 'sealed', 1)
if stopped then redis.call('HSET', key, 'stopped', 'sealed') end -- a retry need not open it for more lines
if ARGV[5] ~= '' then redis.call('HSET', key, 'reason', ARGV[5]) end
if (ARGV[6] or '') ~= '' then redis.call('HSET', key, 'expected', ARGV[6]) end
batch_state(batch).touched = true
apply_to_batches(now_ms())
return { 'ok' }
