"""Scaling inside the gradient, at the borders of a 16-bit function."""
