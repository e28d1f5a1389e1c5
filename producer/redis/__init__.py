"""What only producers do in Redis."""
