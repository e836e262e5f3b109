"""Reports on a model's numbers and on skipped steps."""
