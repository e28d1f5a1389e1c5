-- TERMS_PUT: write what an operator allows or forbids a tenant or a key: small, and wanted most where a
-- tenant has filled Redis.
-- ARGV: hash, field, value
-- Touches: warmq:tenants or warmq:gateway:keys
-- Returns: nothing
unblock()
redis.call('HSET', ARGV[1], ARGV[2], ARGV[3])
