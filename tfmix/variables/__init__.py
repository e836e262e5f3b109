"""Optimizers that store variables or slots in 16 or 8 bits."""
