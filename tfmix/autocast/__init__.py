"""What Keras does differently while a 16-bit policy is active."""
