"""`tfmix run`: trains a script in another policy, and measures it."""
