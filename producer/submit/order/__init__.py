"""The order in which a batch's requests are queued, so that equal beginnings run together."""
