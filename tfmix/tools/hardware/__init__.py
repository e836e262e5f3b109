"""Devices and their abilities, and the cost of a training step on them."""
