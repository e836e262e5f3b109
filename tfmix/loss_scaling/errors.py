"""The exceptions of a training run; wrong arguments raise standard errors."""


class LossScaleError(RuntimeError):
    """Raised when loss scaling cannot make the gradients finite.

    The message names the variables whose gradients were not finite, most
    often first, and says what to change.
    """
