-- TERMS_PUT: write a tenant's weight and cap, or an API key with its limits, even if Redis is full: an operator may
-- need this because a tenant has filled it.
-- ARGV: key of the hash, field, value
-- Touches: warmq:tenants or warmq:gateway:keys
-- Returns: nothing
allow_when_full()
redis.call('HSET', ARGV[1], ARGV[2], ARGV[3])
