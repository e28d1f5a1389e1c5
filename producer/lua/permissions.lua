-- PERMISSIONS: try commands, and tell what Redis says to each. Those that write find a scratch key of
-- another type, or one that this removes: nobody else ever sees a change.
-- ARGV: commands (JSON: a list of lists of words)
-- Touches: warmq:{leases,scratch}
-- Returns: {the error of each command, empty if it has none, ...}
redis.pcall('ZREM', LEASES, '') -- see unblock(); here it may be what is refused
local said = {}
for i, words in ipairs(cjson.decode(ARGV[1])) do
  local reply = redis.pcall(unpack(words))
  said[i] = type(reply) == 'table' and reply.err or ''
end
redis.pcall('DEL', 'warmq:scratch')
return said
