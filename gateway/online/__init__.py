"""Online requests: queued immediately, awaited without polling, streamed while written."""
