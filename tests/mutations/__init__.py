"""Deliberate faults in tfmix, each of which the quick tests must notice."""
