-- RESERVE: hold tokens of a tenant's budget for a batch, by model, in place of what it holds already.
-- ARGV: tenant, batch id, most tokens of one model ('' for no limit), model, tokens, model, tokens, ...
-- Touches: warmq:gateway:enqueued:<tenant>, warmq:gateway:reserved:<tenant>, warmq:gateway:reserved
-- Returns: {1}; {0, model, tokens that are held by other batches} if it does not fit, and nothing changed
local tenant, batch, limit = ARGV[1], ARGV[2], tonumber(ARGV[3])
local sums, held = 'warmq:gateway:enqueued:' .. tenant, 'warmq:gateway:reserved:' .. tenant
local before = redis.call('HGET', held, batch)
before = before and cjson.decode(before).models or {}
if limit then
  for i = 4, #ARGV, 2 do
    local model, tokens = ARGV[i], tonumber(ARGV[i + 1])
    local others = tonumber(redis.call('HGET', sums, model) or 0) - (before[model] or 0)
    if others + tokens > limit then return { 0, model, others } end
  end
end
for model, tokens in pairs(before) do
  if redis.call('HINCRBY', sums, model, string.format('%d', -tokens)) <= 0 then
    redis.call('HDEL', sums, model)
  end
end
local models = {}
for i = 4, #ARGV, 2 do
  models[ARGV[i]] = tonumber(ARGV[i + 1])
  redis.call('HINCRBY', sums, ARGV[i], ARGV[i + 1])
end
redis.call('HSET', held, batch, cjson.encode({ at = now_ms(), models = models }))
redis.call('HSET', 'warmq:gateway:reserved', batch, tenant)
return { 1 }
