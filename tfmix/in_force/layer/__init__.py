"""A layer under an active policy: its inputs, and its fallback to float32."""
