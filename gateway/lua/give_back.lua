-- GIVE_BACK: return a batch's reserved tokens to the budget of its tenant.
-- ARGV: batch id
-- Touches: warmq:gateway:enqueued:<tenant>, warmq:gateway:reserved:<tenant>, warmq:gateway:reserved
-- Returns: 1; 0 if it had nothing reserved
allow_when_full()
local batch = ARGV[1]
local tenant = redis.call('HGET', 'warmq:gateway:reserved', batch)
if not tenant then return 0 end
redis.call('HDEL', 'warmq:gateway:reserved', batch)
local sums, reserved = 'warmq:gateway:enqueued:' .. tenant, 'warmq:gateway:reserved:' .. tenant
local reservation = redis.call('HGET', reserved, batch)
redis.call('HDEL', reserved, batch)
if not reservation then return 0 end
for model, tokens in pairs(cjson.decode(reservation).models) do
  if redis.call('HINCRBY', sums, model, string.format('%d', -tokens)) <= 0 then
    redis.call('HDEL', sums, model)
  end
end
return 1
