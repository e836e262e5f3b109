"""Ratios against Keras's own classes, measured in the same run."""
