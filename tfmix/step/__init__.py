"""Applies a train step as a whole, or skips it as a whole."""
