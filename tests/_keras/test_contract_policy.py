"""Keras keeps its own global policy like this."""

import threading

import keras

from tests._keras.contracts import common, dense, spy


def test_keras_reads_and_writes_its_policy_through_two_functions(monkeypatch):
    state = common("global_state")
    reads = spy(monkeypatch, state, "get_global_attribute")
    writes = spy(monkeypatch, state, "set_global_attribute")
    keras.config.set_dtype_policy("mixed_float16")
    assert [call[1] for call in writes] == ["dtype_policy"]
    assert writes[0][2].name == "mixed_float16"
    reads.clear()
    assert dense().compute_dtype == "float16"
    assert "dtype_policy" in [call[1] for call in reads]
    reads.clear()
    assert keras.config.dtype_policy().name == "mixed_float16"
    assert [call[1] for call in reads] == ["dtype_policy"]


def test_the_tracker_of_this_thread_holds_keras_own_policy():
    state, others = common("global_state"), []
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert state.GLOBAL_STATE_TRACKER.dtype_policy.name == "mixed_bfloat16"
    state.GLOBAL_STATE_TRACKER.dtype_policy = keras.DTypePolicy("float16")
    assert keras.config.dtype_policy().name == "float16"
    thread = threading.Thread(
        target=lambda: others.append(
            getattr(state.GLOBAL_STATE_TRACKER, "dtype_policy", None)
        )
    )
    thread.start()
    thread.join()
    assert others == [None]


def test_clear_session_starts_another_tracker():
    state = common("global_state")
    keras.config.set_dtype_policy("mixed_bfloat16")
    before = state.GLOBAL_STATE_TRACKER
    keras.utils.clear_session(free_memory=False)
    assert state.GLOBAL_STATE_TRACKER is not before
    assert getattr(state.GLOBAL_STATE_TRACKER, "dtype_policy", None) is None
