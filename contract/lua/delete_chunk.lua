-- DELETE, further steps: remove the results of the first index chunk, and the chunk; with the
-- last chunk the batch itself.
-- ARGV: batch, chunk as it is stored ('' if there is none left), request ids of the chunk...
-- Touches: warmq:batch:<id>*, celery-task-meta-<id>, warmq:attempts:<id>, warmq:{batches,retiring,returns,
--   deaths,revoked}, the batch's list, warmq:turns:*
-- Returns: 1 if there is more to remove, else 0.
local key = batch_key(ARGV[1])
if redis.call('EXISTS', key) == 1 and redis.call('HEXISTS', key, 'deleting') == 0 then return 0 end
-- Another delete may have been faster.
if (redis.call('LINDEX', key .. ':index', 0) or '') ~= ARGV[2] then return 1 end
for i = 3, #ARGV do
  redis.call('UNLINK', RESULT .. ARGV[i], kept_key(ARGV[1], ARGV[i]), attempts_key(ARGV[i]))
  forget_counts(ARGV[i])
  redis.call('ZREM', 'warmq:revoked', ARGV[i])
end
redis.call('LPOP', key .. ':index')
if redis.call('EXISTS', key .. ':index') == 1 then return 1 end
remove_list(ARGV[1], redis.call('HGET', key, 'list')) -- a lease may have come back since DELETE
redis.call('UNLINK', key, key .. ':failed', key .. ':finished', key .. ':held', followers_key(ARGV[1]))
redis.call('ZREM', RETIRING, ARGV[1])
redis.call('ZREM', 'warmq:batches', ARGV[1])
return 0
