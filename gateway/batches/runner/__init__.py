"""The batch runner: each gateway's process that queues batches and writes their output files.

Every step can be repeated: if a batch runner is killed, another one continues from the state in
Redis (docs/explanation/architecture.md).
"""
