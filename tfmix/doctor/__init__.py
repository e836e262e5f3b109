"""What 16-bit arithmetic does to a model's numbers, layer by layer."""
