"""Converts existing models to 16 bit, in place or as a copy, and back."""
