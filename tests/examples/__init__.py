"""Each example runs unchanged, and is as good as in float32."""
