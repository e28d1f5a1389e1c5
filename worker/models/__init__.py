"""Several models on one worker: which model is loaded when, and how a worker swaps them."""
