-- COLLECTED: note when all results of a finished batch were kept elsewhere.
-- ARGV: batch, life
-- Touches: warmq:batch:<id>
-- Returns: 1, or 0 if the batch is gone or not finished (any more)
unblock()
if not batch_alive(ARGV[1], ARGV[2]) or not batch_state(ARGV[1]).finished then return 0 end
redis.call('HSET', batch_key(ARGV[1]), 'collected_at', string.format('%.0f', now_ms()))
return 1
