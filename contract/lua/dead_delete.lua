-- DEAD DELETE: remove dead letters and their messages, but not the results of their requests.
-- ARGV: dead letter ids
-- Touches: warmq:dead, warmq:dead:<n>
-- Returns: how many were removed.
allow_when_full()
local count = 0
for i = 1, #ARGV do count = count + forget_letter(ARGV[i]) end
return count
