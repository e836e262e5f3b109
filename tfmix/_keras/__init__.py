"""The private side of Keras and TensorFlow: all of it that we reach into."""
