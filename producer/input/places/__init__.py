"""Where inputs are read from and outputs go: files, and objects in buckets."""
