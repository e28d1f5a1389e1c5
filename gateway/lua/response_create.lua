-- RESPONSE_CREATE: write the record of a background response, unless its id exists, and schedule the first look at
-- it: if the gateway dies before it has queued the request, another one does so then.
-- ARGV: id, owner, created (s), document (JSON), body of its request (JSON), ms after which the record is
--   removed if no gateway notes the response's end, ms until the first look
-- Touches: warmq:gateway:response:<id>, warmq:gateway:due:response, warmq:gateway:records,
--   warmq:gateway:records:<owner>
-- Returns: 1, also if an earlier call has written this very document, and its reply was lost; 0 if the id exists
local id, owner, document, body = ARGV[1], ARGV[2], ARGV[4], ARGV[5]
local key = 'warmq:gateway:response:' .. id
local written = redis.call('HGET', key, 'document')
if written then return written == document and 1 or 0 end
redis.call('HSET', key, 'owner', owner, 'created', ARGV[3], 'document', document, 'body', body)
redis.call('PEXPIRE', key, ARGV[6])
redis.call('ZADD', 'warmq:gateway:due:response', now_ms() + tonumber(ARGV[7]), id)
count_record(owner, 'response:' .. id, #document + #body + RECORD_BYTES)
return 1
