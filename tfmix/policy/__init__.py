"""Which dtype is used where: policies, their rules, and devices."""
