"""Carries batches: from their file to the queue, and from its results to their files.

It runs in a process of its own beside each gateway, so that reading files takes no time from online
requests. Whatever it does can be done again: one that is killed is followed by another, which goes
on where Redis says that it was (docs/explanation/architecture.md).
"""
