"""What exceeds the sweep's bounds under tfmix's default policy, and why.

The same list, in words for users, is `docs/what-stays-float32.md`; a test
compares the two.
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

# By the label of the recipe.
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
    """Says why a deviation is known, or None if it is not.

    A reason for an inaccurate result does not excuse one that is not finite:
    only a result out of range does. Nothing excuses an error.
    """
    known = EXCEPTIONS.get(name)
    if deviation.not_finite:
        return known if known == OUT_OF_RANGE else None
    if deviation.error or known == OUT_OF_RANGE:
        return None
    return known
