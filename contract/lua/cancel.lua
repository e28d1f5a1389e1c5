-- CANCEL: commit `cancelled` for the requests named, queued or running. Messages stay where they are: POP
-- and DONE keep them for RETRY.
-- ARGV: batch, life, flag 0|1|expired, ttl_ms, then pairs (request id, meta)
--   flag 1 seals the batch and makes POP cancel the rest of it (first call of a batch cancel)
--   flag expired seals the batch, and commits `expired`: its deadline has passed, whether or not
--   there is a worker that would note it
-- Touches: warmq:batch:<id>*, celery-task-meta-<id>, channels warmq:cancel, warmq:batch-cancel
-- Returns: how many lines were ended; -1 if the batch is gone.
local batch, life, outcome = ARGV[1], ARGV[2], ARGV[3] == 'expired' and 'expired' or 'cancelled'
unblock()
if not batch_alive(batch, life) then return -1 end
local state = batch_state(batch)
if ARGV[3] == '1' and not state.finished then
  redis.call('HSET', batch_key(batch), 'cancelling', 1, 'sealed', 1)
  redis.call('PUBLISH', 'warmq:batch-cancel', batch)
  state.touched = true
elseif outcome == 'expired' and not state.finished then
  redis.call('HSET', batch_key(batch), 'sealed', 1)
  state.touched = true
end
local ids, lines = {}, 0
for i = 5, #ARGV, 2 do
  if commit(ARGV[i], ARGV[i + 1], outcome, batch, life, tonumber(ARGV[4]), 0, 0) then
    ids[#ids + 1] = ARGV[i]
    lines = lines + 1 + followers_of(batch, ARGV[i])
    note_ended(batch, ARGV[i], outcome, 0, '')
  end
end
if #ids > 0 and ARGV[3] ~= '1' then redis.call('PUBLISH', 'warmq:cancel', cjson.encode(ids)) end
apply_to_batches(now_ms())
return lines
