-- DELETE, further steps: remove the results of the first index chunk, and the chunk.
-- ARGV: batch, chunk as it is stored, request ids of the chunk...
-- Touches: warmq:batch:<id>:index, celery-task-meta-<id>, warmq:{returns,deaths}
-- Returns: 1, or 0 if there is a batch again that must keep what it has.
local key = batch_key(ARGV[1])
if redis.call('EXISTS', key) == 1 then return 0 end
-- Another delete may have been faster.
if redis.call('LINDEX', key .. ':index', 0) ~= ARGV[2] then return 1 end
for i = 3, #ARGV do
  redis.call('UNLINK', RESULT .. ARGV[i])
  forget_counts(ARGV[i])
end
redis.call('LPOP', key .. ':index')
return 1
