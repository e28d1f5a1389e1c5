-- OBJECT_PAGE: read a page of an owner's objects, sorted by creation and id. If Redis takes writes, it also removes
-- expired objects from the list.
-- ARGV: kind, owner, id after which the page begins ('' for the first page), most objects, 1 for the oldest
--   first, place in the list at which to continue ('' for the page's beginning)
-- Touches: warmq:gateway:<kind>:<id>, warmq:gateway:<kind>s:<owner>, warmq:gateway:records,
--   warmq:gateway:records:<owner>
-- Returns: {answer, place in the list, id, version, document, id, ...}. The answer is 0; 1 if more objects follow;
--   -1 if the owner has no such id; 3 if EXAMINE entries were read: call again with the place, for the rest of
--   the page.
local EXAMINE, writes = 1000, may_write()
local kind, owner, after, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local list, prefix = 'warmq:gateway:' .. kind .. 's:' .. owner, 'warmq:gateway:' .. kind .. ':'
local range, rank = 'ZREVRANGE', 'ZREVRANK'
if ARGV[5] == '1' then range, rank = 'ZRANGE', 'ZRANK' end
local first = tonumber(ARGV[6])
if not first then
  first = 0
  if after ~= '' then
    local at = redis.call(rank, list, after)
    if not at then return { -1, 0 } end
    first = at + 1
  end
end
local page, gone, examined, at_once = { 0, 0 }, {}, 0, math.max(most, 50) -- page begins with answer and place
while page[1] == 0 do
  local ids = redis.call(range, list, first, first + at_once)
  for _, id in ipairs(ids) do
    first = first + 1
    local version, document = unpack(redis.call('HMGET', prefix .. id, 'version', 'document'))
    local n = #page
    if not version then
      gone[#gone + 1] = id
    elseif n >= most * 3 + 2 then
      page[1] = 1
      break
    else
      page[n + 1], page[n + 2], page[n + 3] = id, version, document
    end
  end
  examined = examined + #ids
  if #ids <= at_once then break end
  if page[1] == 0 and examined >= EXAMINE then page[1] = 3 end
end
for _, id in ipairs(writes and gone or {}) do -- they have expired
  redis.call('ZREM', list, id)
  first = first - 1
  count_record(owner, kind .. ':' .. id, 0)
end
page[2] = first
return page
