-- Shared by every script: functions that count a batch's failures by error code, and stop a batch with too many. The
-- field `failures` of the batch's hash has a line for each code, in the order in which the codes first occurred:
-- <code> <number of failed lines> <request id> ... The ids are those of the first requests that failed with this code
-- and were not retried. The results of these requests have custom_id, line and message.
local code_in, change_failures, mark_stopped, stop_if_failing, reopen_batch

do -- Lua allows a script 200 local variables at a time; those of this block end with it
  local FIRST_IDS, MOST_CODES, OTHER_CODES = 5, 20, 'other'

  -- Returns the error code in the meta of a failure. Quotes within a JSON string are escaped, so no string can
  -- contain a match.
  function code_in(meta)
    local code = string.match(meta or '', '"error":{"code":"([%w_.:-]+)"')
    return code and #code <= 64 and code or OTHER_CODES
  end

  -- Returns the field's lines as {code, count, ids}, as a list and by code.
  local function read_failures(text)
    local list, by_code = {}, {}
    for code, count, rest in string.gmatch(text or '', '(%S+) (%d+)([^\n]*)') do
      local found = { code = code, count = tonumber(count), ids = {} }
      for id in string.gmatch(rest, '%S+') do table.insert(found.ids, id) end
      list[#list + 1], by_code[code] = found, found
    end
    return list, by_code
  end

  -- Adds failures, a list of {id, code, lines}, to a batch's field. Negative `lines` remove the failures of a
  -- request that runs again.
  function change_failures(key, changes)
    local list, by_code = read_failures(redis.call('HGET', key, 'failures'))
    for _, change in ipairs(changes) do
      local code = change.code
      if not by_code[code] and (#list >= MOST_CODES or change.lines < 0) then code = OTHER_CODES end
      local found = by_code[code]
      if not found and change.lines > 0 then
        found = { code = code, count = 0, ids = {} }
        list[#list + 1], by_code[code] = found, found
      end
      if found then
        found.count = math.max(0, found.count + change.lines)
        if change.lines < 0 then
          for n = #found.ids, 1, -1 do
            if found.ids[n] == change.id then table.remove(found.ids, n) end
          end
        elseif #found.ids < FIRST_IDS and #change.id <= 64 and not string.find(change.id, '%s') then
          table.insert(found.ids, change.id)
        end
      end
    end
    local lines = {}
    for _, found in ipairs(list) do
      if found.count > 0 then
        local numbers = string.format('%s %.0f', found.code, found.count)
        lines[#lines + 1] = table.concat({ numbers, unpack(found.ids) }, ' ')
      end
    end
    if #lines > 0 then
      redis.call('HSET', key, 'failures', table.concat(lines, '\n'))
    else
      redis.call('HDEL', key, 'failures')
    end
  end

  -- Fewest lines from which a share of failures is computed.
  local FEWEST_JUDGED = 100
  local STOP_FIELDS = { 'stop_after', 'cancelling', 'sealed', 'total', 'valid', 'completed', 'failed',
                        'cancelled', 'expired', 'judged_from' }

  -- Returns the expected share of failing lines in a batch: the share of rejected lines among the lines read so
  -- far, and for the valid rest the share of failures among those that ended. Rejected lines end at once, so their
  -- share among the ended lines would be too high at the beginning.
  local function failing_share(total, rejected, ended, failed)
    local rejected_share = total >= FEWEST_JUDGED and rejected / total or 0
    local ran = ended - rejected
    return rejected_share + (1 - rejected_share) * (ran >= FEWEST_JUDGED and (failed - rejected) / ran or 0)
  end

  -- Returns a field of a batch's hash as a number; 0 if the hash does not have it.
  local function number_of(field) return tonumber(field or 0) end

  -- Notes why warmq cancels a batch, and whether the batch was sealed before. Into a batch that is stopped while it
  -- is `open`, ENQUEUE still takes lines, which end as cancelled: so its results have all lines of its file.
  function mark_stopped(key, reason)
    if redis.call('HEXISTS', key, 'cancelling') == 1 then return end
    local sealed = redis.call('HEXISTS', key, 'sealed') == 1
    redis.call('HSET', key, 'reason', reason, 'stopped', sealed and 'sealed' or 'open')
  end

  -- Cancels a batch if its failures have reached `stop_after`, a number or a share in percent. `judged_from` has
  -- counts (total, rejected, ended, failed) that are subtracted: those from before a retry, or negative ones, which
  -- add the earlier windows of a run.
  function stop_if_failing(id, key)
    local stop_after, cancelling, sealed, total, valid, completed, failed, cancelled, expired, judged_from =
      unpack(redis.call('HMGET', key, unpack(STOP_FIELDS)))
    local most, percent = string.match(stop_after or '', '^([%d.]+)(%%?)$')
    if not most or cancelling then return end
    total, failed = number_of(total), number_of(failed)
    local ended = number_of(completed) + failed + number_of(cancelled) + number_of(expired)
    if sealed and ended >= total then return end
    local rejected, from = total - number_of(valid), {}
    for number in string.gmatch(judged_from or '', '%-?%d+') do from[#from + 1] = tonumber(number) end
    if #from == 4 then
      total, rejected, ended, failed = total - from[1], rejected - from[2], ended - from[3], failed - from[4]
    end
    local reached = percent == '' and failed or 100 * failing_share(total, rejected, ended, failed)
    if reached < (tonumber(most) or math.huge) then return end
    local reason = string.format('stopped: %.0f of %.0f requests failed (stop after failures: %s)', failed, ended,
                                 stop_after)
    mark_stopped(key, reason)
    redis.call('HSET', key, 'cancelling', 1)
    redis.call('PUBLISH', 'warmq:batch-cancel', id)
  end

  -- Opens a batch again for a retry; `lines` is the number of lines that will have another answer. Earlier
  -- failures no longer count for `stop_after`.
  function reopen_batch(batch, lines, now)
    local key = 'warmq:batch:' .. batch
    local stop_after, stopped, deadline, planned, announced, total, valid, completed, failed, cancelled, expired =
      unpack(redis.call('HMGET', key, 'stop_after', 'stopped', 'deadline', 'planned', 'announced', 'total', 'valid',
                        'completed', 'failed', 'cancelled', 'expired'))
    redis.call('HDEL', key, 'finished_at', 'cancelling')
    deadline = tonumber(deadline or '')
    if deadline and deadline <= now then redis.call('HDEL', key, 'deadline') end
    redis.call('HINCRBY', key, 'retried', lines)
    -- If a batch was cancelled before all its messages were queued, the same submit queues the rest.
    local unqueued = number_of(planned) < number_of(announced)
    if unqueued or stopped == 'open' then redis.call('HDEL', key, 'sealed') end
    redis.call('ZREM', 'warmq:retiring:2', batch)
    if stop_after then
      total, failed = number_of(total), number_of(failed)
      local ended = number_of(completed) + failed + number_of(cancelled) + number_of(expired)
      local from = string.format('%.0f %.0f %.0f %.0f', total, total - number_of(valid), ended, failed)
      redis.call('HSET', key, 'judged_from', from)
    end
    if stopped then redis.call('HDEL', key, 'reason', 'stopped') end
  end
end
