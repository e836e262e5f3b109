"""Packages with hooks on Keras do under a policy what they do in float32."""

import keras
import numpy as np
import pytest

import tfmix

POLICIES = ["mixed_float16", "mixed_bfloat16"]
X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = X[:, :1] - X[:, 1:2]
# Several of them use what other packages have deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def network(policy):
    keras.utils.set_random_seed(1)
    with tfmix.policy_scope(policy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(8, "relu"),
                keras.layers.Dense(1),
                tfmix.float32_output(),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("policy", ["float32", *POLICIES])
def test_mlflow_logs_the_arguments_of_fit(policy, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    mlflow.keras.autolog(log_models=False)
    try:
        model = network(policy)
        history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0).history
    finally:
        mlflow.keras.autolog(disable=True)
    logged = mlflow.last_active_run().data
    assert (logged.params["epochs"], logged.params["batch_size"]) == ("2", "4")
    assert logged.metrics["loss"] == pytest.approx(history["loss"][-1])


@pytest.mark.parametrize("policy", POLICIES)
def test_shap_attributes_as_in_float32(policy):
    shap = pytest.importorskip("shap")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("shap.DeepExplainer replaces gradients of TensorFlow")

    def attributed(model):
        explainer = shap.DeepExplainer(model, X[:8])
        return np.asarray(explainer.shap_values(X[8:], check_additivity=False))

    exact, model = network("float32"), network(policy)
    model.set_weights(exact.get_weights())
    wanted, found = attributed(exact), attributed(model)
    assert np.abs(wanted).max() > 0.1
    bound = {"mixed_float16": 0.002, "mixed_bfloat16": 0.016}[policy]
    assert np.abs(found - wanted).max() < bound


@pytest.mark.parametrize("policy", POLICIES)
def test_optuna_prunes_a_trial(policy):
    optuna = pytest.importorskip("optuna")
    pruning = pytest.importorskip("optuna_integration").KerasPruningCallback

    def objective(trial):
        model = network(policy)
        model.optimizer.learning_rate = trial.suggest_float("rate", 1e-3, 0.1)
        prune = pruning(trial, "loss")
        history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[prune])
        return history.history["loss"][-1]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.GridSampler({"rate": [0.1, 0.001]}, seed=0)
    never = optuna.pruners.NopPruner()
    always = optuna.pruners.ThresholdPruner(upper=0.0, n_warmup_steps=1)
    for pruner, ended in ((always, "PRUNED"), (never, "COMPLETE")):
        study = optuna.create_study(sampler=sampler, pruner=pruner)
        study.optimize(objective, n_trials=1)
        (trial,) = study.trials
        assert trial.state.name == ended
        assert all(map(np.isfinite, trial.intermediate_values.values()))


@pytest.mark.parametrize("policy", POLICIES)
def test_wandb_logs_each_epoch_offline(policy, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.integration.keras import WandbMetricsLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(dir=tmp_path, mode="offline") as run:
        history = network(policy).fit(
            X, Y, epochs=2, verbose=0, callbacks=[WandbMetricsLogger()]
        )
        logged = run.summary["epoch/loss"]
    assert logged == pytest.approx(history.history["loss"][-1])
