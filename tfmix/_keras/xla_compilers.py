"""Knows by private names of JAX which of XLA's compilers are registered.

There are no public ones. They were checked on jax 0.10.2 with libtpu 0.0.52 and
the CUDA 12 plugin.
"""


def is_registered(platform: str) -> bool:
    """Returns whether JAX knows a platform's compiler."""
    from jax._src import xla_bridge

    return platform in xla_bridge._topology_factories
