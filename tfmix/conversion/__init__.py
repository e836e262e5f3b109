"""Existing models: into 16 bit, in place or as a copy, and back."""
