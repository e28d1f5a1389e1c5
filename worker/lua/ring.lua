-- RING: add a worker's counts since its last call to the current minute, in two histories: the queue's last
-- day and the worker's last hour. The field of a minute is used again after a day (an hour), so that the
-- hashes stay small.
-- ARGV: queue, worker, then counts: requests answered, requests ended otherwise, prompt tokens,
--   tokens written, prompt tokens from the prefix cache, slot-seconds in use, slot-seconds in all
-- Touches: warmq:ring:<queue>, warmq:ring-of:<worker>
-- Returns: the number of the minute, counted from 1970
allow_when_full()
local DAY, HOUR = 1440, 60
local minute = math.floor(now_ms() / 60000)

local function add(key, minutes, first, last)
  local field, sums = minute % minutes, {}
  local before = redis.call('HGET', key, field) or ''
  local numbers = string.gmatch(before, '%S+')
  local same = tonumber(numbers() or -1) == minute
  for at = first, last do
    local sum = tonumber(ARGV[at]) + (same and tonumber(numbers() or 0) or 0)
    sums[#sums + 1] = string.format('%.0f', math.min(math.max(sum, 0), 2 ^ 53))
  end
  redis.call('HSET', key, field, minute .. ' ' .. table.concat(sums, ' '))
  redis.call('PEXPIRE', key, (minutes + 5) * 60000)
end

add('warmq:ring:' .. ARGV[1], DAY, 3, 9)
add('warmq:ring-of:' .. ARGV[2], HOUR, 3, 9)
return minute
