"""From the queue into the engine and back: leases, slots, commits, deaths."""
