"""What NVIDIA publishes of an H200, on which the choice for float8 rests."""

BANDWIDTH = 4.8e12  # bytes a second
SIXTEEN_BIT = 989.4e12  # operations a second in products
FLOAT8 = 1978.9e12
