-- COLLECTED: note when all results of a finished batch were kept elsewhere; or, with marks, which files
-- hold results of any batch. A mark stands for the content of a file; the latest ones are kept.
-- ARGV: batch, life[, mark...]
-- Touches: warmq:batch:<id>
-- Returns: 1, or 0 if the batch is gone, or not finished (any more) where no marks are given
unblock()
local key, MARKS = batch_key(ARGV[1]), 16
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
