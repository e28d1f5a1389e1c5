"""The drain: takes requests from the queue, runs them in the engine, and writes their results."""
