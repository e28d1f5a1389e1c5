"""Online requests: queued at once, awaited without polling, streamed as their text comes."""
