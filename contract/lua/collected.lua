-- COLLECTED: note that all results of a finished batch are now stored elsewhere, and when. With fingerprints of
-- output files: note that these files have results of the batch, which need not be finished.
-- ARGV: batch, life[, fingerprint...]
-- Touches: warmq:batch:<id>
-- Returns: 1; 0 if the batch is gone or, without fingerprints, not finished
allow_when_full()
local key, KEPT = batch_key(ARGV[1]), 16 -- the latest KEPT fingerprints are kept
if not batch_alive(ARGV[1], ARGV[2]) then return 0 end
if #ARGV == 2 then
  if not batch_state(ARGV[1]).finished then return 0 end
  redis.call('HSET', key, 'collected_at', string.format('%.0f', now_ms()))
  return 1
end
local written = {}
for fingerprint in string.gmatch(redis.call('HGET', key, 'written') or '', '%S+') do
  table.insert(written, fingerprint)
end
for n = 3, #ARGV do table.insert(written, ARGV[n]) end
redis.call('HSET', key, 'written', table.concat(written, ' ', math.max(1, #written - KEPT + 1)))
return 1
