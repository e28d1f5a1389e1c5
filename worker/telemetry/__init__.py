"""What operators see of a worker: subscribers of the drain's events, and readers of its counts."""
