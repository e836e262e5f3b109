"""Optimizers for 16-bit variables."""
