"""Callbacks that monitor loss scaling and 16-bit numbers during `fit`."""
