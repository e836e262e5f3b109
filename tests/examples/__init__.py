"""Each example runs as it is, and is as good as the same in float32."""
