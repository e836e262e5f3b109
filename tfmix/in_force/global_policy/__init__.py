"""The global policy: who is asked for it, and the layers made under it."""
