"""Keras's own tests, which its wheel contains, run under a 16-bit policy."""
