"""Ratios against Keras's own classes, measured in the same run."""

import os

# TensorFlow would greet in each process.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
