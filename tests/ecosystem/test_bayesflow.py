"""A workflow of bayesflow trains under a policy as in float32."""

import functools

import keras
import numpy as np
import pytest

import tfmix

bayesflow = pytest.importorskip("bayesflow")
SEEDS = (1, 2, 3)
STEPS, BATCH = 32, 32


def simulations():
    """Returns two parameters, and noisy observations of them."""
    random = np.random.default_rng(0)
    theta = random.normal(size=(STEPS * BATCH, 2))
    noise = random.normal(size=theta.shape)
    return {"theta": theta, "x": theta + 0.5 * noise}


def trained(policy, seed=SEEDS[0]):
    """Returns a workflow after 32 steps, and its loss over the second half."""
    keras.utils.set_random_seed(seed)
    tfmix.set_global_policy(policy)
    workflow = bayesflow.BasicWorkflow(
        inference_network=bayesflow.networks.CouplingFlow(
            depth=2, subnet_kwargs={"widths": (16, 16)}
        ),
        inference_variables=["theta"],
        inference_conditions=["x"],
        initial_learning_rate=5e-3,
    )
    data = simulations()
    history = workflow.fit_offline(data, epochs=1, batch_size=BATCH, verbose=0)
    (loss,) = history.history["loss"]
    return workflow, loss


@functools.cache
def in_float32():
    return [trained("float32", seed)[1] for seed in SEEDS]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_workflow_trains_as_in_float32(policy, record_property):
    expected = in_float32()
    workflow, loss = trained(policy)
    record_property("loss", loss)
    record_property("float32", expected)
    # Three seeds do not show all noise, so 1 % is added, as for backbones.
    noise = max(expected) - min(expected) + 0.01 * max(expected)
    assert min(expected) - noise <= loss <= max(expected) + noise
    seen = {"x": simulations()["x"][:4]}
    drawn = workflow.sample(conditions=seen, num_samples=8)["theta"]
    assert drawn.shape == (4, 8, 2)
    assert np.all(np.isfinite(drawn))
    assert workflow.approximator.optimizer.skipped_steps == 0
