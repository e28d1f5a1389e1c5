-- WEBHOOK_PUT: store a new webhook of a batch's end, or replace a stored one.
-- ARGV: id, document (JSON), lifetime of a new webhook in s ('' for a stored one, which keeps its expiry)
-- Touches: warmq:gateway:webhook:<id>
-- Returns: 1; 0 if nothing was written
allow_when_full()
local key = 'warmq:gateway:webhook:' .. ARGV[1]
local reply
if ARGV[3] ~= '' then
  reply = redis.call('SET', key, ARGV[2], 'NX', 'EX', ARGV[3])
else
  reply = redis.call('SET', key, ARGV[2], 'XX', 'KEEPTTL')
end
return reply and 1 or 0
