"""Products and sums whose weight gets its gradient in float32."""
