"""What an op computes while a 16-bit policy is active."""
