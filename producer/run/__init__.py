"""A file of any size through the queue, in windows, into one output that grows by them."""
