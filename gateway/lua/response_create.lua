-- RESPONSE_CREATE: write the record of a background response, unless its id exists.
-- ARGV: id, owner, created (s), document (JSON), body of its request (JSON), ms after which the record is
--   removed if no gateway notes the response's end
-- Touches: warmq:gateway:response:<id>, warmq:gateway:records, warmq:gateway:records:<owner>
-- Returns: 1; 0 if the id exists
local id, owner, document, body = ARGV[1], ARGV[2], ARGV[4], ARGV[5]
local key = 'warmq:gateway:response:' .. id
if redis.call('EXISTS', key) == 1 then return 0 end
redis.call('HSET', key, 'owner', owner, 'created', ARGV[3], 'document', document, 'body', body)
redis.call('PEXPIRE', key, ARGV[6])
count_record(owner, 'response:' .. id, #document + #body + RECORD_BYTES)
return 1
