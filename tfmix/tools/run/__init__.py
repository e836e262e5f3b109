"""`tfmix run`: trains a script with another policy, and measures it."""
