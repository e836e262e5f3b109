"""The private names of Keras, TensorFlow and JAX that tfmix uses."""
