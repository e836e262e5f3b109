"""What Keras, TensorFlow and JAX keep private: all that we reach into."""
