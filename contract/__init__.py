"""What the worker and the producer have agreed on, and nothing else.

The two sides never import each other. Schemas, error codes, key names, the
message envelope, the Lua protocol and the store that runs it live here.
"""
