-- RUN_NOTE: set fields of a run's record, and note whether the run has ended. Nobody collects results of a record.
-- ARGV: run, life, ended 0|1, then pairs (field, value)
-- Touches: warmq:batch:<id>, warmq:retiring
-- Returns: 1; 0 if the record is gone
allow_when_full()
local key = batch_key(ARGV[1])
if not batch_alive(ARGV[1], ARGV[2]) then return 0 end
for i = 4, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
if ARGV[3] == '1' then
  local now = now_ms()
  redis.call('HSET', key, 'finished_at', now, 'collected_at', now)
  redis.call('ZADD', RETIRING, now, ARGV[1])
end
return 1
