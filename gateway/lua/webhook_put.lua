-- WEBHOOK_PUT: store a new delivery, or write a known one.
-- ARGV: id, document (JSON), lifetime of a new one in s ('' for a known one, whose expiry stays)
-- Touches: warmq:gateway:webhook:<id>
-- Returns: 1; 0 if nothing was written
unblock()
local key = 'warmq:gateway:webhook:' .. ARGV[1]
local done
if ARGV[3] ~= '' then
  done = redis.call('SET', key, ARGV[2], 'NX', 'EX', ARGV[3])
else
  done = redis.call('SET', key, ARGV[2], 'XX', 'KEEPTTL')
end
return done and 1 or 0
