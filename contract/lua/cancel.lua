-- CANCEL: commit `cancelled` for the requests named, queued or running. The
-- message itself stays where it is: POP and DONE drop what has a result.
-- ARGV: batch, created, flag 0|1, ttl_ms, then pairs (request id, meta)
--   flag 1 seals the batch and makes POP drop the rest of it (first call of a batch cancel)
-- Touches: warmq:batch:<id>*, celery-task-meta-<id>, channels warmq:cancel, warmq:batch-cancel
-- Returns: how many were cancelled; -1 if the batch is gone.
local batch, created = ARGV[1], ARGV[2]
unblock()
if batch ~= '' and not batch_alive(batch, created) then return -1 end
if ARGV[3] == '1' and redis.call('HEXISTS', batch_key(batch), 'finished_at') == 0 then
  redis.call('HSET', batch_key(batch), 'cancelling', 1, 'sealed', 1)
  redis.call('PUBLISH', 'warmq:batch-cancel', batch)
  touched[batch] = true
end
local ids = {}
for i = 5, #ARGV, 2 do
  if commit(ARGV[i], ARGV[i + 1], 'cancelled', batch, created, tonumber(ARGV[4]), 0, 0) then
    ids[#ids + 1] = ARGV[i]
  end
end
if #ids > 0 and ARGV[3] ~= '1' then redis.call('PUBLISH', 'warmq:cancel', cjson.encode(ids)) end
complete_touched(now_ms())
return #ids
