"""An order: how a model is created, and the steps that follow."""

import dataclasses
import functools

import keras

import tfmix

TENSORFLOW = keras.backend.backend() == "tensorflow"
SIXTEEN = ("float16", "bfloat16")
POLICIES = ("mixed_float16", "mixed_bfloat16", *SIXTEEN, "O1", "O2")
KINDS = ("sequential", "functional", "subclassed")
# Wrappers of the user's optimizer, inside of the loss scaler.
WRAPS = {
    "bare": None,
    "scaled": None,
    "masters": tfmix.optimizers.MasterWeightOptimizer,
    "stochastic": functools.partial(tfmix.optimizers.BFloat16Optimizer, seed=3),
    "low": functools.partial(tfmix.optimizers.LowMemoryOptimizer, seed=3),
    "masters8": lambda inner: tfmix.optimizers.MasterWeightOptimizer(
        tfmix.optimizers.LowMemoryOptimizer(inner, seed=3)
    ),
}
# The dtypes of variables that some wrappers refuse.
REFUSES = {
    "stochastic": ("float16",),
    # "any" may be any of these.
    "any": SIXTEEN,
}
FROZEN = ("first", "bn", "last")
# The updates are so small that a 16-bit weight without a master never changes.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(1e-3),
    "momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
}
# A step is drawn as often as it is listed. A step without a meaning at its
# place (an undo without a conversion) does nothing.
STEPS = (
    *(f"apply:{policy}" for policy in POLICIES),
    *(f"apply:{policy}" for policy in POLICIES[:4]),
    *["apply:float32"] * 4,
    *(f"compile:{name}:{wrap}" for name in OPTIMIZERS for wrap in WRAPS),
    *["compile:same"] * 2,
    *(f"freeze:{layer}" for layer in FROZEN),
    *["thaw"] * 2,
    *["file"] * 3,
    *["weights"] * 2,
    *(f"copy:{policy}" for policy in ("float32", *POLICIES[:4])),
    *(f"global:{policy}" for policy in ("float32", "float32", *POLICIES[:4])),
    *(f"scope:{policy}" for policy in ("float32", *POLICIES[:3])),
    *["guard"] * 2,
    *["check", "scale_monitor"],
    *["loop"] * 3,
)
# The share of undo among the steps after a conversion.
UNDO_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class Order:
    """The settings of a model, and the steps that follow."""

    steps: tuple[str, ...]
    kind: str = "sequential"
    made: str = "float32"
    optimizer: str = "sgd"
    wrap: str = "bare"
    mode: str = "eager"
    replicas: int = 1
    # True if conversions are inside of the strategy's scope.
    inside: bool = True


def draw(rng, replicas=1, modes=None):
    """Draws an order from hypothesis's random numbers."""
    weights = {"eager": 82, "graph": 12, "xla": 6}
    modes = modes or [m for m in weights if _runs(m, replicas)]
    mode = rng.choice([m for m in modes for _ in range(weights[m])])
    # Each conversion and each `compile` needs a new trace.
    longest = 6 if mode == "eager" else 3
    steps = []
    for _ in range(rng.randint(1, longest)):
        converted = any(step.startswith("apply:") for step in steps)
        undo = converted and rng.random() < UNDO_SHARE
        steps.append("undo" if undo else rng.choice(STEPS))
    return Order(
        steps=tuple(steps),
        kind=rng.choice(KINDS),
        made=rng.choice(("float32", *POLICIES)),
        optimizer=rng.choice(list(OPTIMIZERS)),
        wrap=rng.choice(list(WRAPS)),
        mode=mode,
        replicas=replicas,
        inside=rng.choice((True, False)) if replicas > 1 else True,
    )


def _runs(mode, replicas):
    # TensorFlow cannot run replicas under XLA on a CPU. JAX always uses XLA.
    return mode != "xla" or (TENSORFLOW and replicas == 1)
