-- RING: add a worker's counts since its last call to the current minute, in two histories: the queue's last
-- day and the worker's last hour. Each is a hash with one field for a minute. The queue's fields are used again
-- after a day, the worker's after an hour, so that the hashes stay small.
-- ARGV: queue, worker, then counts: requests answered, requests ended otherwise, prompt tokens,
--   tokens written, prompt tokens from the prefix cache, slot-seconds in use, slot-seconds in all
-- Touches: warmq:ring:<queue>, warmq:ring-of:<worker>
-- Returns: the number of the minute, counted from 1970
allow_when_full()
-- The lengths of the histories in minutes; the first and the last count in ARGV.
local DAY, HOUR, FIRST, LAST = 1440, 60, 3, 9
local minute = math.floor(now_ms() / 60000)

-- Adds the counts to this minute's field of a history with `minutes` fields; an older minute's counts there are
-- replaced.
local function add(key, minutes)
  local field, sums = minute % minutes, {}
  local before = redis.call('HGET', key, field) or ''
  local numbers = string.gmatch(before, '%S+')
  local is_this_minute = tonumber(numbers() or -1) == minute
  for at = FIRST, LAST do
    local sum = tonumber(ARGV[at]) + (is_this_minute and tonumber(numbers() or 0) or 0)
    sums[#sums + 1] = string.format('%.0f', math.min(math.max(sum, 0), 2 ^ 53))
  end
  redis.call('HSET', key, field, minute .. ' ' .. table.concat(sums, ' '))
  redis.call('PEXPIRE', key, (minutes + 5) * 60000)
end

add('warmq:ring:' .. ARGV[1], DAY)
add('warmq:ring-of:' .. ARGV[2], HOUR)
return minute
