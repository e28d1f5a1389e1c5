-- DELETE, first step: forget the batch, so that no script touches it again. The
-- caller then removes results and index chunk by chunk (delete_chunk.lua).
-- ARGV: batch, created ('' if there was no batch)
-- Touches: warmq:batch:<id>, its :failed and :finished, warmq:{batches,retiring}
-- Returns: 1, or 0 if the batch is not finished, or another one than meant.
local key = batch_key(ARGV[1])
local created = redis.call('HGET', key, 'created_at')
if created and (created ~= ARGV[2] or redis.call('HEXISTS', key, 'finished_at') == 0) then return 0 end
redis.call('UNLINK', key, key .. ':failed', key .. ':finished')
redis.call('ZREM', 'warmq:retiring', ARGV[1])
redis.call('ZREM', 'warmq:batches', ARGV[1])
return 1
