-- SWAP CLAIM: let a worker claim a queue for which it is about to load the model, so that two workers do not
-- swap for the same backlog. If the number of the queue's claims is no longer the one that the worker has read,
-- it gets no claim, and decides again.
-- ARGV: queue, worker, slots, claim_ms, number of the queue's claims that the worker has read
-- Touches: warmq:swap-claims (hash: queue NUL worker -> expiry in ms NUL slots NUL time of the claim in ms)
-- Returns: 1 if the claim is made, else 0.
allow_when_full()
local CLAIMS = 'warmq:swap-claims'
local queue, worker, slots, claim_ms, claims_read = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local now, count = now_ms(), 0
local claims = redis.call('HGETALL', CLAIMS)
for at = 1, #claims, 2 do
  local ends = tonumber(string.match(claims[at + 1], '^%d+'))
  if not ends or ends <= now then
    redis.call('HDEL', CLAIMS, claims[at])
  elseif string.sub(claims[at], 1, #queue + 1) == queue .. '\0' then
    count = count + 1
  end
end
if count ~= claims_read then return 0 end
local claim = string.format('%.0f', now + claim_ms) .. '\0' .. slots .. '\0' .. string.format('%.0f', now)
redis.call('HSET', CLAIMS, queue .. '\0' .. worker, claim)
redis.call('PEXPIRE', CLAIMS, 86400000)
return 1
