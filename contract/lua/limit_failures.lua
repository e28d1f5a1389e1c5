-- LIMIT_FAILURES: change the number or share of failures at which a batch is cancelled.
-- ARGV: batch, life, `stop_after` ('' for never)
-- Touches: warmq:batch:<id>
-- Returns: 1, or 0 if the batch is gone.
allow_when_full()
if not batch_alive(ARGV[1], ARGV[2]) then return 0 end
if ARGV[3] ~= '' then
  redis.call('HSET', batch_key(ARGV[1]), 'stop_after', ARGV[3])
else
  redis.call('HDEL', batch_key(ARGV[1]), 'stop_after')
end
return 1
