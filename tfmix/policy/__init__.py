"""Policies: which layers and ops compute in which dtype, on which device."""
