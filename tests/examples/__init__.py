"""Each example runs, and what it claims comes true."""
