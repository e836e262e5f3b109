"""Which dtype is used where: policies, their rules, and how Keras gets them."""
