-- PUSH: queue online requests. A request with a mark (for its Idempotency-Key) is queued once, and again
-- only after a failure that a retry may avoid: not after a success or a rejection.
-- ARGV: most waiting messages, most fraction of maxmemory (why_full), then for each request: list key, request
--   id, lifetime of its mark in ms ('': no mark), message
-- Touches: the list keys, warmq:turns:*, warmq:once:<id>, celery-task-meta-<id>
-- Returns: for each request 1 (queued now), 0 (queued before: its mark exists), its stored result (begins
--   with {), or the reason why the queue is full
local REJECTED = '{"status":"FAILURE","result":{"exc_type":"RequestRejected"'
allow_when_full() -- the caller's two limits decide whether the queue is full, not maxmemory

-- Returns the reply for a request that need not be queued, or nil.
local function reply_to_known(id)
  if result_status(id) ~= '' then
    local meta = redis.call('GET', RESULT .. id)
    local final = string.sub(meta, 1, 19) == '{"status":"SUCCESS"' or string.sub(meta, 1, #REJECTED) == REJECTED
    if final then return meta end
    redis.call('DEL', RESULT .. id, 'warmq:once:' .. id)
  end
  return redis.call('EXISTS', 'warmq:once:' .. id) == 1 and 0 or nil
end

local reasons = {} -- queue -> why it is full, or ''
-- Returns why the queue of a list is full, or nil.
local function reason_if_full(list)
  local queue = place_of(list)
  reasons[queue] = reasons[queue] or why_full(list, tonumber(ARGV[1]), tonumber(ARGV[2])) or ''
  return reasons[queue] ~= '' and reasons[queue] or nil
end

local replies, lists, bytes = {}, {}, 0
for i = 3, #ARGV, 4 do
  local list, id, keep_ms, message = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local answer = keep_ms ~= '' and reply_to_known(id) or reason_if_full(list)
  if not answer then
    if keep_ms ~= '' then redis.call('SET', 'warmq:once:' .. id, '1', 'PX', keep_ms) end
    lists[list] = lists[list] or {}
    table.insert(lists[list], message)
    bytes = bytes + #message
  end
  replies[#replies + 1] = answer or 1
end
for list, messages in pairs(lists) do
  join(list) -- first: if Redis's ACL forbids writes to the turns, the script ends before it pushes
  call_many('LPUSH', list, messages)
  note_pushed(list, #messages)
end
if bytes > 1024 * 1024 then collectgarbage() end
return replies
