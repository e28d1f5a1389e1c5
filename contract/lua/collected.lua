-- COLLECTED: note that all results of a finished batch are now stored elsewhere, and when. With marks: note which
-- output files have results of this batch, finished or not. A mark stands for the content of a file.
-- ARGV: batch, life[, mark...]
-- Touches: warmq:batch:<id>
-- Returns: 1; 0 if the batch is gone or, without marks, not finished
allow_when_full()
local key, MARKS = batch_key(ARGV[1]), 16 -- the latest MARKS marks are kept
if not batch_alive(ARGV[1], ARGV[2]) then return 0 end
if #ARGV == 2 then
  if not batch_state(ARGV[1]).finished then return 0 end
  redis.call('HSET', key, 'collected_at', string.format('%.0f', now_ms()))
  return 1
end
local marks = {}
for mark in string.gmatch(redis.call('HGET', key, 'written') or '', '%S+') do
  table.insert(marks, mark)
end
for n = 3, #ARGV do table.insert(marks, ARGV[n]) end
redis.call('HSET', key, 'written', table.concat(marks, ' ', math.max(1, #marks - MARKS + 1)))
return 1
