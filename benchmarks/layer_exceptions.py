"""The layers that exceed the sweep's bounds under tfmix, and the reasons.

`docs/what-stays-float32.md` has the same list for users, and a test compares
the two.
"""

from benchmarks import layer_deviation

SATURATED_ATTENTION = (
    "rounded queries and keys decide a saturated softmax differently"
)
SATURATED_GATE = (
    "the gradient of a saturated gate follows the rounding of its 16-bit sum"
)
UNSCALED = (
    "gradients below float16's smallest number, which a loss scale brings back"
)
OUT_OF_RANGE = (
    "its result leaves float16's range there, and its gradient is the result"
)

# The keys are labels of recipes.
EXCEPTIONS: dict[str, str] = {
    "GroupQueryAttention": SATURATED_ATTENTION,
    "GroupQueryAttention(dropout=0.1)": SATURATED_ATTENTION,
    "MultiHeadAttention": SATURATED_ATTENTION,
    "MultiHeadAttention(dropout=0.1)": SATURATED_ATTENTION,
    "Bidirectional": UNSCALED,
    "ConvLSTM3D": SATURATED_GATE,
    "GRUCell": SATURATED_GATE,
    "LSTMCell": SATURATED_GATE,
    "SimpleRNNCell": SATURATED_GATE,
    "activations.exponential": OUT_OF_RANGE,
}


def reason(name: str, deviation: layer_deviation.Deviation) -> str | None:
    """Returns the known reason for a deviation, None if there is none.

    A reason for inaccuracy does not excuse NaN or infinity: only a result out
    of range does. Nothing excuses an error.
    """
    known = EXCEPTIONS.get(name)
    if deviation.not_finite:
        return known if known == OUT_OF_RANGE else None
    if deviation.error or known == OUT_OF_RANGE:
        return None
    return known
