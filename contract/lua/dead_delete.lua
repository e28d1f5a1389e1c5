-- DEAD DELETE: forget dead letters and their messages; results stay.
-- ARGV: dead letter ids
-- Touches: warmq:dead, warmq:dead:<n>
-- Returns: how many there were.
local count = 0
for i = 1, #ARGV do
  count = count + redis.call('HDEL', 'warmq:dead', ARGV[i])
  redis.call('UNLINK', 'warmq:dead:' .. ARGV[i])
end
return count
