"""Changes what Keras does while a 16-bit policy is active."""
