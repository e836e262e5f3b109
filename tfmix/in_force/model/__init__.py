"""A model that carries a policy: its calls, its compile, its fit."""
