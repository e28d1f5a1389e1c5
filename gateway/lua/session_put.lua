-- SESSION_PUT: remember who logged in at the page: small and short-lived, and an operator needs the page
-- most where Redis is full.
-- ARGV: digest of the session's token, digest of the key that logged in, s to remember it
-- Touches: warmq:gateway:session:<digest>
-- Returns: nothing
unblock()
redis.call('SET', 'warmq:gateway:session:' .. ARGV[1], ARGV[2], 'EX', ARGV[3])
