-- WEBHOOK_PUT: keep a delivery, unless it is known, or write how it went, unless it was forgotten.
-- ARGV: id, document (JSON), s to remember it ('' to write one that is known; its end stays)
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
