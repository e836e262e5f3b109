"""One step of the loss-scale optimizer, on each backend."""
