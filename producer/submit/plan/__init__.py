"""What a file will take before anything of it is queued: tokens, shared beginnings, Redis, time."""
