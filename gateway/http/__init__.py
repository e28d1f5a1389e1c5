"""What every call of the gateway passes, and what every answer is made of."""
