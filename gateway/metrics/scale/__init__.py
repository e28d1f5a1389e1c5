"""What an autoscaler asks."""
