-- SESSION_PUT: store a session of the page, even if Redis is full: an operator may need the page then.
-- ARGV: digest of the session's token, digest of the key that logged in, its lifetime in s
-- Touches: warmq:gateway:session:<digest>
-- Returns: nothing
allow_when_full()
redis.call('SET', 'warmq:gateway:session:' .. ARGV[1], ARGV[2], 'EX', ARGV[3])
