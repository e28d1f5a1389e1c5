-- CANCEL: end requests of a batch, queued or running, as `cancelled` or `expired`; or begin to cancel the whole
-- batch. Messages stay where they are; POP and DONE keep them for RETRY.
-- ARGV: batch, life, flag, default time to live of a result in ms, then pairs (request id, meta)
--   flag 0 commits `cancelled` for these requests
--   flag 1 is the first call of a cancel of the whole batch: it seals the batch and makes POP cancel its waiting
--   requests; instead of pairs the reason follows, '' if a user cancels
--   flag `expired` seals the batch, whose deadline has passed, and commits `expired` for these requests, even if
--   no worker runs
-- Touches: channels warmq:cancel, warmq:batch-cancel, endings
-- Returns: how many lines have ended; -1 if the batch is gone.
local batch, life, flag, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local outcome = flag == 'expired' and 'expired' or 'cancelled'
allow_when_full()
if not batch_alive(batch, life) then return -1 end
local state = batch_state(batch)
if flag == '1' and not state.finished then
  local reason = ARGV[5] or ''
  if reason ~= '' then mark_stopped(batch_key(batch), reason) end
  redis.call('HSET', batch_key(batch), 'cancelling', 1, 'sealed', 1)
  redis.call('PUBLISH', 'warmq:batch-cancel', batch)
  state.touched = true
elseif outcome == 'expired' and not state.finished then
  redis.call('HSET', batch_key(batch), 'sealed', 1)
  state.touched = true
end
local ids, lines = {}, 0
-- A cancel of the whole batch has no pairs.
local first_pair = flag == '1' and #ARGV + 1 or 5
for i = first_pair, #ARGV, 2 do
  if commit(ARGV[i], ARGV[i + 1], outcome, batch, life, ttl_ms, 0, 0) then
    ids[#ids + 1] = ARGV[i]
    lines = lines + 1 + followers_of(batch, ARGV[i])
    note_ended(batch, ARGV[i], outcome, 0, '')
  end
end
if #ids > 0 and flag ~= '1' then redis.call('PUBLISH', 'warmq:cancel', cjson.encode(ids)) end
apply_to_batches(now_ms())
return lines
