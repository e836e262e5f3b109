"""A model trained in 16 bit is exported, frozen, reloaded and differentiated.

A trace for inference contains nothing of tfmix: Keras's own policy would trace
the same.
"""

import re

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers
from tests.project import test_docs
from tests.tree import ROOT
from tfmix._keras import version

pytestmark = helpers.requires_backend("tensorflow")

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import (
        convert_variables_to_constants_v2,
    )

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(16, 6)).astype("float32")
STEPS = RNG.normal(size=(16, 5, 6)).astype("float32")
IMAGES = RNG.normal(size=(4, 8, 8, 3)).astype("float32")
POLICIES = ("mixed_float16", "mixed_bfloat16", "float16")
# The tolerance of the reloaded model's outputs, by the policy.
WITHIN = {"mixed_float16": 2e-3, "mixed_bfloat16": 2e-2, "float16": 2e-3}


class Own(layers.Layer):
    """A layer whose code multiplies by a weight in some way."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], shape[-1]))

    def times(self, x):
        return ops.matmul(x, self.w)

    def twice(self, x):
        def step(i, a):
            return i + 1, self.times(a)

        return ops.while_loop(lambda i, _: i < 2, step, (0, x))[1]

    def differentiated(self, x):
        @tf.custom_gradient
        def doubled(x):
            return tf.tanh(x), lambda upstream: 2 * upstream

        return doubled(self.times(x))

    def call(self, x):
        return self.way(self, x)


def own(way):
    return stack(ROWS, lambda: Own(way))


def stack(x, *some):
    def make():
        made = [layer() for layer in some]
        return keras.Sequential(
            [keras.Input(x.shape[1:]), *made, layers.Dense(2)]
        )

    return make, x


def attention():
    x = keras.Input((5, 6))
    return keras.Model(
        x, layers.Dense(2)(layers.MultiHeadAttention(2, 3)(x, x))
    )


KINDS = {
    "dense": stack(ROWS, lambda: layers.Dense(4)),
    "lstm": stack(STEPS, lambda: layers.LSTM(4)),
    "masked": stack(STEPS, layers.Masking, lambda: layers.LSTM(4)),
    "attention": (attention, STEPS),
    "convolution": stack(
        IMAGES,
        lambda: layers.Conv2D(4, 3),
        layers.BatchNormalization,
        layers.GlobalAveragePooling2D,
    ),
    "loop": own(lambda layer, x: layer.twice(x)),
    "gradient": own(lambda layer, x: layer.differentiated(x)),
}


def of_tfmix(graph):
    """Lists the operations of a graph with a gradient of tfmix."""
    functions = [node for f in graph.library.function for node in f.node_def]
    return [
        node.name
        for node in [*graph.node, *functions]
        if node.attr["_gradient_op_type"].s.startswith(b"Tfmix")
    ]


def trained(kind, policy):
    tfmix.set_global_policy(policy)
    keras.utils.set_random_seed(0)
    make, x = KINDS[kind]
    model = make()
    model.compile("sgd", "mse")
    model.fit(x, np.zeros((len(x), *model.output_shape[1:])), verbose=0)
    return model, x


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_is_deployed(kind, policy, tmp_path):
    model, x = trained(kind, policy)
    right, within = model.predict(x, verbose=0), WITHIN[policy]

    model.export(tmp_path / "exported", verbose=False)
    reloaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(reloaded.serve(x), right, atol=within)
    graph = reloaded.signatures["serve"].graph.as_graph_def()
    assert of_tfmix(graph) == []

    # Its gradient is that of Keras's own policy.
    given = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(given)
        loss = tf.reduce_sum(reloaded.serve(given) ** 2)
    assert np.isfinite(tape.gradient(loss, given)).all()

    tf.saved_model.save(model, tmp_path / "saved")
    saved = tf.saved_model.load(tmp_path / "saved")
    signature = saved.signatures["serving_default"]
    assert of_tfmix(signature.graph.as_graph_def()) == []

    shape = tf.TensorSpec((None, *x.shape[1:]))
    function = tf.function(lambda x: model(x)).get_concrete_function(shape)
    frozen = convert_variables_to_constants_v2(function)
    (outputs,) = tf.nest.flatten(frozen(given))
    np.testing.assert_allclose(outputs, right, atol=within)
    assert of_tfmix(frozen.graph.as_graph_def()) == []

    lite = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "exported"))
    lite.target_spec.supported_ops = [
        tf.lite.OpsSet.TFLITE_BUILTINS,
        tf.lite.OpsSet.SELECT_TF_OPS,
    ]
    assert len(lite.convert()) > 0


@pytest.mark.costly
def test_the_search_for_operations_of_tfmix_finds_those_of_training():
    model, x = trained("dense", "mixed_float16")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    graph = step.get_concrete_function(tf.constant(x)).graph.as_graph_def()
    assert of_tfmix(graph)


PAGE = ROOT / "docs" / "recipes" / "deployment.md"
ROW = re.compile(r"^\| ([^|]+) \| `([^`|]+)` \| (\d+) \| ([^|]+) \|$", re.M)
TABLE = ROW.findall(PAGE.read_text(encoding="utf-8"))
NEEDS = {"ONNX": "onnxruntime tf2onnx", "Core ML": "coremltools"}


def lite(file):
    interpreter = tf.lite.Interpreter(str(file))
    (entry,) = interpreter.get_input_details()

    def run(x):
        interpreter.resize_tensor_input(entry["index"], x.shape)
        # This fails if the model needs Flex ops, which are not linked.
        interpreter.allocate_tensors()
        interpreter.set_tensor(entry["index"], x)
        interpreter.invoke()
        (result,) = interpreter.get_output_details()
        return interpreter.get_tensor(result["index"])

    return run


def onnx(file):
    session = pytest.importorskip("onnxruntime").InferenceSession(str(file))
    (entry,) = session.get_inputs()
    return lambda x: session.run(None, {entry.name: x})[0]


def frozen(file):
    graph = tf.compat.v1.GraphDef.FromString(file.read_bytes())
    assert of_tfmix(graph) == []
    # The last operation of the graph is the output.
    first, last = "x:0", f"{graph.node[-1].name}:0"

    def run(x):
        with tf.Graph().as_default() as place:
            tf.import_graph_def(graph, name="")
            with tf.compat.v1.Session(graph=place) as session:
                return session.run(last, {first: x})

    return run


def saved(file):
    reloaded = tf.saved_model.load(file)
    return lambda x: reloaded.serve(x)


def kept(file):
    return keras.models.load_model(file, compile=False)


RUN = {".tflite": lite, ".onnx": onnx, ".pb": frozen, ".keras": kept}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the page's blocks define, and a trained model."""
    text = PAGE.read_text(encoding="utf-8")
    keras.utils.set_random_seed(0)
    names = test_docs.run_page(text, str(PAGE))
    names["right"] = names["trained"].predict(names["x"], verbose=0)
    for model in ("whole", "half"):
        names[model](names["x"])
    return names


def test_the_table_of_deployment_is_found():
    assert len(TABLE) == 12


# Keras warns about layers without weights to quantize.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.every_case
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            # TensorFlow's converter is slow, and runs once for each format.
            marks=pytest.mark.slow if "weights" in row[0] else (),
            id=row[0],
        )
        for row in TABLE
    ],
)
def test_each_row_of_the_table_is_true(row, page, tmp_path, monkeypatch):
    target, line, kilobytes, within = row
    for package in NEEDS.get(target.split(",")[0], "").split():
        page[package] = pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    exec(line, page)
    name = re.findall(r'"([\w.]+)"', line.replace('"int8"', ""))
    (file,) = [tmp_path / x for x in name if (tmp_path / x).exists()]
    files = [x for x in file.rglob("*") if x.is_file()] or [file]
    size = sum(x.stat().st_size for x in files) / 1000
    expected = int(kilobytes)
    if not file.suffix and version.numbers(keras.__version__) >= (3, 16):
        # It writes the weights of a SavedModel once, and no longer twice.
        expected /= 2
    assert size == pytest.approx(expected, rel=0.05)
    if within != "not run":
        found = RUN.get(file.suffix, saved)(file)(page["x"])
        assert found.dtype == "float32"
        np.testing.assert_allclose(found, page["right"], atol=float(within))
