"""Reports on a model's numbers, and on steps that skipped."""
