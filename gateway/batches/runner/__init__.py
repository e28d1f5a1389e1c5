"""The batch runner: a process with each gateway that reads files and writes outputs of batches.

Every step can be repeated: a runner that is killed is followed by another, which continues where
Redis shows that it was (docs/explanation/architecture.md).
"""
