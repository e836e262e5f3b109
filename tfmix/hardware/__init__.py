"""What an accelerator makes of a model."""
