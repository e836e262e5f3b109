"""The faults of `benchmarks.faults`, one small function each."""
