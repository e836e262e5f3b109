"""Matrix products in float8: the arithmetic, and the layers that use it."""
