-- DEAD ADOPT: give dead letters that an older warmq wrote (protocol 1) the form of today.
-- ARGV: dead letter ids
-- Touches: warmq:dead, warmq:dead:<n>
-- Returns: {the record of each, nil for one that is gone}
unblock()
local records = {}
for i = 1, #ARGV do
  local record = redis.call('HGET', 'warmq:dead', ARGV[i])
  records[i] = record and adopt_letter(ARGV[i], record)
end
return records
