"""Loss scales, the optimizer that applies them, and atomic steps."""
