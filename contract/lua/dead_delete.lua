-- DEAD DELETE: forget dead letters and their messages; results stay.
-- ARGV: dead letter ids
-- Touches: warmq:dead, warmq:dead:<n>
-- Returns: how many there were.
unblock()
local count = 0
for i = 1, #ARGV do count = count + forget_letter(ARGV[i]) end
return count
