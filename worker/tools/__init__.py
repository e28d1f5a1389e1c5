"""Commands beside the worker: check, compile, triton."""
