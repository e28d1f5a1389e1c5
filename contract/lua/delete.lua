-- DELETE, the first step of a delete: mark the batch as gone for all other scripts. The caller then removes
-- results and index chunk by chunk (delete_chunk.lua); if it fails, a worker does (worker/drain/sweeper.py).
-- ARGV: batch, life, force 0|1
--   force deletes a batch that is not finished; the caller has cancelled it
-- Touches: warmq:batch:<id>, its :index and its lists, turns, warmq:retiring, channel warmq:batch-cancel
-- Returns: 1; 0 if the batch is not finished and force is 0, or has another life.
local key = batch_key(ARGV[1])
if redis.call('HEXISTS', key, 'deleting') == 1 then return 1 end
local state = batch_state(ARGV[1])
if state.life ~= ARGV[2] or not state.finished and ARGV[3] ~= '1' then return 0 end
allow_when_full()
redis.call('HSET', key, 'deleting', 1)
redis.call('PERSIST', key) -- the hash must not expire before the results, which are found through it
redis.call('PERSIST', key .. ':index')
redis.call('ZADD', RETIRING, now_ms(), ARGV[1])
remove_list(ARGV[1], state.list, redis.call('HGET', key, 'queues'))
redis.call('PUBLISH', 'warmq:batch-cancel', ARGV[1])
return 1
