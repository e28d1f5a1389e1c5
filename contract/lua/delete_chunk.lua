-- DELETE_CHUNK, the later steps of a delete: remove the results of the first chunk of the batch's index, and the
-- chunk; after the last chunk remove the batch.
-- ARGV: batch, chunk as it is stored ('' if there is none left), request ids of the chunk...
-- Touches: warmq:batch:<id>*, celery-task-meta-<id>, warmq:attempts:<id>, warmq:{batches,retiring,returns,
--   deaths,revoked}, the batch's lists, turns
-- Returns: 1 if there is more to remove, else 0.
local key = batch_key(ARGV[1])
if redis.call('EXISTS', key) == 1 and redis.call('HEXISTS', key, 'deleting') == 0 then return 0 end
-- Another delete of this batch has removed this chunk meanwhile; the caller reads the next one.
if (redis.call('LINDEX', key .. ':index', 0) or '') ~= ARGV[2] then return 1 end
for i = 3, #ARGV do
  redis.call('UNLINK', RESULT .. ARGV[i], kept_key(ARGV[1], ARGV[i]), attempts_key(ARGV[i]))
  forget_counts(ARGV[i])
  redis.call('ZREM', 'warmq:revoked', ARGV[i])
end
redis.call('LPOP', key .. ':index')
if redis.call('EXISTS', key .. ':index') == 1 then return 1 end
local lists = redis.call('HMGET', key, 'list', 'queues')
remove_list(ARGV[1], lists[1], lists[2]) -- leased requests may have returned since DELETE
redis.call('UNLINK', key, key .. ':failed', key .. ':finished', key .. ':held', key .. ':columns', followers_key(ARGV[1]))
redis.call('ZREM', RETIRING, ARGV[1])
redis.call('ZREM', 'warmq:batches', ARGV[1])
return 0
