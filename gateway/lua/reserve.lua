-- RESERVE: reserve tokens of a tenant's budget for a batch, by model, replacing its earlier ones.
-- ARGV: tenant, batch id, most tokens of one model ('' for no limit), model, tokens, model, tokens, ...
-- Touches: warmq:gateway:enqueued:<tenant>, warmq:gateway:reserved:<tenant>, warmq:gateway:reserved
-- Returns: {1}; {0, model, tokens of its other batches} if the limit is exceeded: then nothing changed
local tenant, batch, limit = ARGV[1], ARGV[2], tonumber(ARGV[3])
local sums, reserved = 'warmq:gateway:enqueued:' .. tenant, 'warmq:gateway:reserved:' .. tenant
local before = redis.call('HGET', reserved, batch)
before = before and cjson.decode(before).models or {}
if limit then
  for i = 4, #ARGV, 2 do
    local model, tokens = ARGV[i], tonumber(ARGV[i + 1])
    local rest = tonumber(redis.call('HGET', sums, model) or 0) - (before[model] or 0)
    if rest + tokens > limit then return { 0, model, rest } end
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
redis.call('HSET', reserved, batch, cjson.encode({ at = now_ms(), models = models }))
redis.call('HSET', 'warmq:gateway:reserved', batch, tenant)
return { 1 }
