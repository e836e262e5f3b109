"""What is replaced in Keras for the whole process while a policy is active."""
