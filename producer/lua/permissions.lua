-- PERMISSIONS: try commands and return Redis's errors. No other client sees a change: a write to the scratch key
-- fails because of the key's type, or the key is deleted at the end.
-- ARGV: commands (JSON: a list of lists of words)
-- Touches: warmq:{leases,scratch}
-- Returns: {the error of each command, '' if it has none, ...}
redis.pcall('ZREM', LEASES, '') -- see allow_when_full(); this call may be refused
local errors = {}
for i, words in ipairs(cjson.decode(ARGV[1])) do
  local reply = redis.pcall(unpack(words))
  errors[i] = type(reply) == 'table' and reply.err or ''
end
redis.pcall('DEL', 'warmq:scratch')
return errors
