"""Keras's tests that rightly fail under a policy of tfmix, with the reason."""

_PROBABILITIES = "What ends in probabilities (a sigmoid, here) is float32."
# By a pattern of `fnmatch` for the test's name below `keras/src`.
REASONS = {
    "callbacks/terminate_on_nan_test.py::TerminateOnNaNTest::"
    "test_raise_error_terminate_stops_on_later_batch": (
        "A step whose target is infinite is skipped, and its loss is left out "
        "of the epoch's, so that training goes on. If the shuffled batches "
        "begin with that one, the loss is NaN and training stops."
    ),
    "optimizers/adam_test.py::AdamTest::test_ema": (
        "In bfloat16, too, `compile` puts a loss scale around the optimizer, "
        "which skips steps that are not finite. The test reads a private "
        "attribute of `model.optimizer` that Keras's own LossScaleOptimizer "
        "does not have: under Keras's mixed_float16 it fails as well."
    ),
    "optimizers/optimizer_test.py::OptimizerTest::test_tf_checkpointing": (
        "The same: `tf.train.Checkpoint(model, optimizer=...)` has to be given "
        "`model.optimizer`, the loss scale, as under Keras's mixed_float16."
    ),
    "trainers/trainer_test.py::TestTrainer::test_adds_loss_scaling_optimizer": (
        "In bfloat16, too, `compile` puts a loss scale around the optimizer, "
        "and the test wants the plain RMSprop there."
    ),
    "models/functional_test.py::FunctionalTest::test_dtype_standardization": (
        "A model returns float32, also where its last layer computes in 16 bit."
    ),
    "layers/core/dense_test.py::DenseTest::test_dense_basics": _PROBABILITIES,
    "layers/core/dense_test.py::DenseTest::test_lora_rank_argument": (
        _PROBABILITIES
    ),
    "layers/core/lambda_layer_test.py::LambdaTest::test_lambda_basics": (
        "A square is float32, which float16 may not hold; a Lambda returns it."
    ),
    "layers/core/reversible_embedding_test.py::*::test_correctness": (
        "16-bit embeddings times float32 numbers are a 16-bit product: 3.3196 "
        "for 3.3202."
    ),
    "optimizers/optimizer_sparse_test.py::*_loss_scale_optimizer_sgd": (
        "Under JAX, Keras's own scaler assigns tracers in an eager step, which "
        "raises unless `assign` is mocked, as here. Under tfmix it raises."
    ),
    "saving/file_editor_test.py::SavingTest::test_scalar_weight": (
        "The test counts the weights in the file of a compiled model. In "
        "bfloat16, too, the loss scale around the optimizer has some, as under "
        "Keras's mixed_float16."
    ),
    "saving/saving_lib_test.py::SavingTest::"
    "test_saved_module_paths_and_class_names": (
        "The file of a compiled model names the loss scale around its "
        "optimizer, so that a run which loads it goes on exactly, also in a "
        "process that sets no policy."
    ),
}
