"""What this machine has: devices, memory, packages."""
