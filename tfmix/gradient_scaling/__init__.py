"""Scales gradients inside float16 models; outside they are unscaled."""
