"""Optimizers that store variables or their own state in 16 or 8 bits."""
