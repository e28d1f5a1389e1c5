-- PUSH: queue requests that have no batch: online ones, whose callers wait for the answer. One with
-- a mark is queued once, however often it is pushed: again only if it has ended in a way that a
-- second attempt may mend (anything but a success and a request that its author must change).
-- ARGV: high water count, high water fraction, then for each request: list key, request id, for how
--   long its mark is kept in ms ('': it has none), message
-- Touches: the list keys, warmq:turns:*, warmq:once:<id>, celery-task-meta-<id>
-- Returns: for each request 1 (queued), 0 (its mark says that it was before), the stored result
--   that it has (begins with {), or why no more may be queued
local REJECTED = '{"status":"FAILURE","result":{"exc_type":"RequestRejected"'
unblock() -- the caller's mark decides what is too much

-- The answer for a request that need not be queued; nil for one that must be.
local function known(id)
  if result_status(id) ~= '' then
    local meta = redis.call('GET', RESULT .. id)
    local final = string.sub(meta, 1, 19) == '{"status":"SUCCESS"' or string.sub(meta, 1, #REJECTED) == REJECTED
    if final then return meta end
    redis.call('DEL', RESULT .. id, 'warmq:once:' .. id)
  end
  return redis.call('EXISTS', 'warmq:once:' .. id) == 1 and 0 or nil
end

local reasons = {} -- by queue: why it is full, or ''
local function full(list)
  local queue = place_of(list)
  reasons[queue] = reasons[queue] or why_full(list, tonumber(ARGV[1]), tonumber(ARGV[2])) or ''
  return reasons[queue] ~= '' and reasons[queue] or nil
end

local replies, lists, bytes = {}, {}, 0
for i = 3, #ARGV, 4 do
  local list, id, keep_ms, message = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local answer = keep_ms ~= '' and known(id) or full(list)
  if not answer then
    if keep_ms ~= '' then redis.call('SET', 'warmq:once:' .. id, '1', 'PX', keep_ms) end
    lists[list] = lists[list] or {}
    table.insert(lists[list], message)
    bytes = bytes + #message
  end
  replies[#replies + 1] = answer or 1
end
for list, messages in pairs(lists) do
  join(list) -- first: who may not change whose turn it is must not have pushed anything
  call_many('LPUSH', list, messages)
  note_pushed(list, #messages)
end
if bytes > 1024 * 1024 then collectgarbage() end
return replies
