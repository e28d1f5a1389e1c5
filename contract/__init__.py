"""The code that worker, producer and gateway share.

Worker and producer never import each other. This package has the formats of messages and results,
the error codes, the names of Redis keys, and access to Redis with the Lua scripts that several of
them run.
"""
