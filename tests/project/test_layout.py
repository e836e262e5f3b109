"""Each file of the core has a test file of its name, or a known one."""

from tests.tree import ROOT

CORE = (
    *("policy", "ops", "gradient_scaling", "step", "loss_scaling"),
    *("autocast", "conversion", "float8", "optimizers", "_keras"),
)
# Files of the core that are tested under another name.
ELSEWHERE = {
    "autocast/layer_calls": "autocast/test_fallback",
    "ops/tensors": "ops/test_apply",
    "ops/ways": "ops/test_loops",
    "loss_scaling/errors": "loss_scaling/test_optimizer",
    "loss_scaling/state": "loss_scaling/test_optimizer",
    "optimizers/eight_bit_slots": "optimizers/test_low_memory",
    "optimizers/wrapper": "optimizers/test_sixteen_bit_optimizer",
    # What only this folder may know of Keras has a contract for each name.
    "_keras/files": "promises/test_export",
    "_keras/float8_kernel": "float8/test_product",
    "_keras/graphs": "conversion/test_convert",
    "_keras/kernels": "step/test_finite",
    "_keras/layers": "_keras/test_contract_meanings",
    "_keras/tapes": "_keras/test_contract_meanings",
    "_keras/training": "_keras/test_contract_meanings",
    "_keras/variables": "_keras/test_contract_meanings",
    "_keras/xla_compilers": "tools/hardware/test_compiling",
}


def core():
    """Lists the files of the core as `folder/file`, without `__init__`."""
    return {
        f"{folder}/{path.stem}"
        for folder in CORE
        for path in (ROOT / "tfmix" / folder).glob("*.py")
        if path.stem != "__init__"
    }


def place(name):
    """Returns the place of the test file of the same name."""
    folder, _, file = name.partition("/")
    return ROOT / "tests" / folder / f"test_{file}.py"


def test_each_file_of_the_core_has_a_test_file():
    for name in sorted(core()):
        path = place(name)
        if name in ELSEWHERE:
            assert not path.exists(), f"take {name} out of ELSEWHERE"
            path = ROOT / "tests" / f"{ELSEWHERE[name]}.py"
        assert path.is_file(), f"tests of tfmix/{name}.py belong into {path}"


def test_the_list_names_files_of_the_core_only():
    assert len(core()) > 40
    assert not ELSEWHERE.keys() - core()
