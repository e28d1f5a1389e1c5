-- OBJECT_PAGE: read a page of an owner's objects, sorted by creation and id.
-- ARGV: kind, owner, id after which the page begins ('' for the first), most, 1 for the oldest first
-- Touches: warmq:gateway:<kind>:<id>, warmq:gateway:<kind>s:<owner>, warmq:gateway:records,
--   warmq:gateway:records:<owner>
-- Returns: {1 if there are more, 0}, id, version, document, id, ...; {-1} if the owner has no such id
local kind, owner, after, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local list, prefix = 'warmq:gateway:' .. kind .. 's:' .. owner, 'warmq:gateway:' .. kind .. ':'
local range, rank = 'ZREVRANGE', 'ZREVRANK'
if ARGV[5] == '1' then range, rank = 'ZRANGE', 'ZRANK' end
local from = 0
if after ~= '' then
  local at = redis.call(rank, list, after)
  if not at then return { -1 } end
  from = at + 1
end
local page, gone = { 0 }, {}
while true do
  local ids = redis.call(range, list, from, from + most)
  for _, id in ipairs(ids) do
    local found = redis.call('HMGET', prefix .. id, 'version', 'document')
    if not found[1] then
      gone[#gone + 1] = id
    elseif #page > most * 3 then
      page[1] = 1
      break
    else
      local n = #page
      page[n + 1], page[n + 2], page[n + 3] = id, found[1], found[2]
    end
  end
  if page[1] == 1 or #ids <= most then break end
  from = from + #ids
end
for _, id in ipairs(gone) do -- they have expired
  redis.call('ZREM', list, id)
  count_record(owner, kind .. ':' .. id, 0)
end
return page
