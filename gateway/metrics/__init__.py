"""/metrics: what the fleet holds in Redis, for Prometheus."""
