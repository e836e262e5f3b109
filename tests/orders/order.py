"""An order: how a model is made, and what is done to it then."""

import dataclasses
import functools
import json
import random

import keras

import tfmix

TENSORFLOW = keras.backend.backend() == "tensorflow"
SIXTEEN = ("float16", "bfloat16")
POLICIES = ("mixed_float16", "mixed_bfloat16", *SIXTEEN, "O1", "O2")
KINDS = ("sequential", "functional", "subclassed")
# Slots in 8 bits, of variables as small as these, too.
EIGHT_BITS = {"slot_dtype": [("", "int8")], "seed": 3}
# What stands around the optimizer that a user gives, inside of the scaler.
WRAPS = {
    "bare": None,
    "scaled": None,
    "masters": tfmix.optimizers.MasterWeightOptimizer,
    "flat": functools.partial(
        tfmix.optimizers.MasterWeightOptimizer, flat=True
    ),
    "split": functools.partial(
        tfmix.optimizers.MasterWeightOptimizer, split=True
    ),
    "stochastic": functools.partial(tfmix.optimizers.BFloat16Optimizer, seed=3),
    "low": functools.partial(tfmix.optimizers.LowMemoryOptimizer, **EIGHT_BITS),
    "masters8": functools.partial(
        tfmix.optimizers.MasterWeightOptimizer, **EIGHT_BITS
    ),
}
# The dtypes of variables that those refuse.
REFUSES = {
    **dict.fromkeys(("split", "stochastic"), ("float16",)),
    "low": SIXTEEN,
    # It may be any of these.
    "any": SIXTEEN,
}
FROZEN = ("first", "bn", "last")
# So small that a 16-bit weight without a master stays where it is.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(1e-3),
    "momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
}
# Drawn as often as they stand here. A step that has no meaning where it
# stands (an undo without a conversion) does nothing.
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
    *["check", "scale_monitor", "numerics_monitor"],
    *["log"] * 2,
    *["forget"] * 2,
)
# Of the steps after a conversion.
UNDO_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class Order:
    """How a model is made, and what is done to it then."""

    steps: tuple[str, ...]
    kind: str = "sequential"
    made: str = "float32"
    optimizer: str = "sgd"
    wrap: str = "bare"
    mode: str = "eager"
    replicas: int = 1
    # Whether conversions stand inside of the strategy's scope.
    inside: bool = True

    def __str__(self):
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text):
        fields = json.loads(text)
        return cls(**{**fields, "steps": tuple(fields["steps"])})


def draw(rng, replicas=1, modes=None):
    """Draws an order from a `random.Random`, or from hypothesis's."""
    weights = {"eager": 82, "graph": 12, "xla": 6}
    modes = modes or [m for m in weights if _runs(m, replicas)]
    mode = rng.choice([m for m in modes for _ in range(weights[m])])
    # Each conversion and `compile` has a graph traced anew.
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
    # Keras's own replicas do not run under XLA on a CPU; JAX always does.
    return mode != "xla" or (TENSORFLOW and replicas == 1)


def numbered(number, seed=0, replicas=1, modes=None):
    """Returns the order of a number; the same for a seed, always."""
    rng = random.Random(f"{seed}/{number}")
    return draw(rng, replicas, modes)
