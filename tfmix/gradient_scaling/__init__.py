"""Gradients of float16 models, scaled inside and true outside."""
