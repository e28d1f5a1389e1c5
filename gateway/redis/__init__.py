"""What gateways share in Redis: their objects, their unfinished work, online requests, keys."""
