"""What acts on Keras while a policy is in force."""
