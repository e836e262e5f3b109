"""Into 16 bit by one call and back by another; the optimizer goes on."""

import pytest

pytest.importorskip("sklearn", reason="the example's data come with it")

import tfmix
from tfmix.examples import one_call


def test_the_call_means_what_it_means_elsewhere():
    model = one_call.build_model()
    optimizer = model.optimizer
    way = one_call.to_float16(model, max_noskip=7, max_scale=2.0**20)
    assert model.optimizer.inner_optimizer is optimizer
    assert model.optimizer.rule == tfmix.DynamicLossScale(
        initial_scale=2.0**16, growth_steps=7, max_scale=2.0**20
    )
    way.to_float32()
    way = one_call.to_float16(model, 64.0, dynamic=False, clip=0.5)
    assert model.optimizer.rule == tfmix.FixedLossScale(64.0)
    assert model.optimizer.global_clipnorm == 0.5
    assert model.layers[0].compute_dtype == "float16"
    way.to_float32()
    assert model.optimizer is optimizer
    assert optimizer.global_clipnorm is None
    assert model.layers[0].compute_dtype == "float32"


def test_flat_masters_make_the_variables_16_bit_and_back():
    model = one_call.build_model()
    way = one_call.to_float16(model, flat_master=True)
    assert model.layers[0].kernel.dtype == "float16"
    masters = model.optimizer.inner_optimizer
    assert isinstance(masters, tfmix.MasterWeightOptimizer)
    assert masters.flat
    way.to_float32()
    assert model.layers[0].kernel.dtype == "float32"


@pytest.mark.slow
def test_every_call_is_as_good_as_staying_in_float32(tmp_path):
    outcome = one_call.RECIPE.run(quiet=True, out=str(tmp_path))
    assert outcome.healthy, [outcome.claims, outcome.runs]
    assert len(outcome.runs) == 12
    assert (tmp_path / "one_call.png").is_file()
