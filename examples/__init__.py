"""Scripts that show tfmix on real data; each has `main()`."""
