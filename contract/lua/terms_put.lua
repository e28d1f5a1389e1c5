-- TERMS_PUT: write a tenant's or a key's terms; an operator needs that most where a tenant has filled
-- Redis.
-- ARGV: hash, field, value
-- Touches: warmq:tenants or warmq:gateway:keys
-- Returns: nothing
unblock()
redis.call('HSET', ARGV[1], ARGV[2], ARGV[3])
