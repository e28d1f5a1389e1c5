"""The worker's commands: start, check, compile, triton."""
