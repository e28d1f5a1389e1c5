"""What worker, producer and gateway have agreed on, and nothing else.

Worker and producer never import each other. Schemas, error codes, key names, the message
envelope, the scripts that several of them run and the store that runs those live here.
"""
