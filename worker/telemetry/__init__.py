"""A worker's metrics, traces and task events, made from the drain's events and counts."""
