-- DELETE_CHUNK, the later steps of a delete: remove the results of the first chunk of the batch's index, and the
-- chunk; after the last chunk remove its messages from lists that several batches use, and the batch.
-- ARGV: batch, chunk as it is stored ('' if there is none left), request ids of the chunk...
-- Touches: warmq:batch:<id>*, celery-task-meta-<id>, warmq:attempts:<id>, warmq:{batches,retiring,returns,
--   deaths,revoked}, the batch's lists, turns
-- Returns: 1 if there is more to remove, else 0.

-- Removes messages of deleted batches from both ends of a list that several batches use: the windows of a run, or
-- batches with `--turn fifo`. One call moves at most MOVE_COUNT messages and MOVE_BYTES. Messages between those of
-- living batches stay until these are deleted, or a worker reaches them. Returns whether the list may have more.
local removed, removed_bytes = 0, 0
local function trim(list)
  local before, more = removed, false
  for _, from in ipairs({ 'RIGHT', 'LEFT' }) do
    while true do
      local message = redis.call('LINDEX', list, from == 'RIGHT' and -1 or 0)
      local request = message and read_message(message)
      if not request or request.batch == '' or batch_alive(request.batch, request.life) then break end
      if removed == MOVE_COUNT or removed_bytes > MOVE_BYTES then
        more = true
        break
      end
      -- Producers have no right to RPOP.
      if from == 'RIGHT' then redis.call('LMOVE', list, list, 'RIGHT', 'LEFT') end
      redis.call('LPOP', list)
      removed, removed_bytes = removed + 1, removed_bytes + #message
    end
  end
  if removed > before then add_to_queue((place_of(list)), 'waiting', before - removed) end
  if redis.call('EXISTS', list) == 0 then drop_list(list) end
  return more
end

-- Trims the batch's list in each of its queues, unless the batch has a list of its own.
local function trim_all(batch, list, queues)
  if not list or is_kombus(list) or string.sub(list, -#batch - 1) == '\6' .. batch then return false end
  local more = false
  for queue in string.gmatch(queues or (place_of(list)), '[^\n]+') do
    more = trim(list_in(queue, list)) or more
  end
  if removed_bytes > 1024 * 1024 then collectgarbage() end -- else the replies stay in Lua's memory
  return more
end

local key = batch_key(ARGV[1])
if redis.call('EXISTS', key) == 1 and redis.call('HEXISTS', key, 'deleting') == 0 then return 0 end
-- Another delete of this batch has removed this chunk meanwhile; the caller reads the next one.
if (redis.call('LINDEX', key .. ':index', 0) or '') ~= ARGV[2] then return 1 end
for i = 3, #ARGV do
  redis.call('UNLINK', RESULT .. ARGV[i], kept_key(ARGV[1], ARGV[i]), attempts_key(ARGV[i]))
  forget_counts(ARGV[i])
  redis.call('ZREM', 'warmq:revoked', ARGV[i])
end
redis.call('LPOP', key .. ':index')
if redis.call('EXISTS', key .. ':index') == 1 then return 1 end
local lists = redis.call('HMGET', key, 'list', 'queues')
remove_list(ARGV[1], lists[1], lists[2]) -- leased requests may have returned since DELETE
if trim_all(ARGV[1], lists[1], lists[2]) then return 1 end
redis.call('UNLINK', key, key .. ':failed', key .. ':finished', key .. ':held', key .. ':columns', followers_key(ARGV[1]))
redis.call('ZREM', RETIRING, ARGV[1])
redis.call('ZREM', 'warmq:batches', ARGV[1])
return 0
