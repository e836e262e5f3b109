"""Imports between our modules point downwards, and form no cycle."""

import ast
import graphlib
import inspect

import pytest

from tests.tree import ROOT

PACKAGE = ROOT / "tfmix"

# The layers from the bottom up. A name covers all modules below it, and the
# most specific name counts.
LAYERS = (
    (
        "_arguments",
        "_bad_rows",
        "_formats",
        "_messages",
        "_progress",
        "_tables",
    ),
    ("_keras",),
    ("_users_code", "policy"),
    ("ops",),
    ("step",),
    ("gradient_scaling", "loss_scaling"),
    ("optimizers",),
    ("float8",),
    ("autocast",),
    ("conversion",),
    ("tools", "tools.diagnostics", "tools.hardware"),
    ("tools.callbacks",),
    ("tools.run",),
    ("tools.demo",),
    ("tools.commands",),
    ("tools.cli",),
    ("callbacks", "hardware"),
    ("__init__", "__main__"),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules(package):
    """Maps dotted names to files; packages are named `name.__init__`."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts): path
        for path in sorted(package.rglob("*.py"))
    }


def imports(path, names):
    """Returns our modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
            assert "tfmix" not in dotted, f"{path}: imports our own __init__"
            found |= {_target(n, names, path) for n in dotted if _ours(n)}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            if not _ours(node.module):
                continue
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                if not {_strip(dotted), f"{_strip(dotted)}.__init__"} & names:
                    dotted = node.module
                found.add(_target(dotted, names, path))
    return found


def _ours(dotted):
    return dotted.split(".")[0] == "tfmix"


def _strip(dotted):
    return dotted.removeprefix("tfmix").removeprefix(".")


def _target(dotted, names, path):
    """Returns the module of an import; for a package, its `__init__`."""
    name = _strip(dotted)
    if name in names:
        return name
    package = f"{name}.__init__" if name else "__init__"
    assert package in names, f"{path}: {dotted} is not a module of tfmix"
    # Only the top-level package may import packages' re-exports.
    allowed = path == PACKAGE / "__init__.py" and name
    assert allowed, f"{path}: imports the package {dotted}, name its module"
    return package


def graph_of(package):
    files = modules(package)
    return {name: imports(path, set(files)) for name, path in files.items()}


def rank(name):
    """Returns the layer a module lies in."""
    own = name.removesuffix(".__init__") if name != "__init__" else name
    while own not in RANKS:
        assert "." in own, f"{name} is in no layer: add it to LAYERS"
        own = own.rpartition(".")[0]
    return RANKS[own]


def check_no_cycle(graph):
    assert any(graph.values()), "no import found: looking in the wrong place"
    # This raises CycleError, which names the cycle.
    graphlib.TopologicalSorter(graph).prepare()


def check_downwards(graph):
    upward = [
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in targets
        if rank(target) > rank(name)
    ]
    assert not upward, f"imports that point upwards: {sorted(upward)}"


def test_imports_have_no_cycle():
    check_no_cycle(graph_of(PACKAGE))


@pytest.mark.costly
def test_imports_point_downwards():
    check_downwards(graph_of(PACKAGE))


def test_no_public_name_hides_a_module():
    # A late import would get either of them by chance.
    import tfmix

    packages = {
        "": tfmix,
        "callbacks.": tfmix.callbacks,
        "hardware.": tfmix.hardware,
        "optimizers.": tfmix.optimizers,
    }
    names = {
        f"{prefix}{name}"
        for prefix, package in packages.items()
        for name, value in vars(package).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert not names & set(modules(PACKAGE))


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A package with our layout, and a function that changes a file of it."""

    def write(name, text):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return graph_of(tmp_path)

    for package in ("_keras", "policy", "loss_scaling"):
        write(f"{package}/__init__", '"""Empty."""\n')
    write("_formats", "import math\n")
    write("_keras/devices", "from tfmix import _formats\n")
    write("policy/policy", "from tfmix._keras.devices import f\n")
    write("loss_scaling/guard", "import tfmix._formats\n")
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    write("__init__", "from tfmix import policy\n")
    return write


def test_an_injected_cycle_is_found(copied):
    copied("loss_scaling/guard", "from tfmix.policy import policy\n")
    late = "def late():\n    from tfmix.loss_scaling import guard\n"
    with pytest.raises(graphlib.CycleError, match="policy.policy"):
        check_no_cycle(copied("policy/policy", late))


def test_an_injected_upward_arrow_is_found(copied):
    graph = copied("_keras/devices", "from tfmix.policy.policy import f\n")
    with pytest.raises(AssertionError, match="_keras.devices -> policy.policy"):
        check_downwards(graph)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import tfmix", "our own __init__"),
        ("from tfmix import Policy", "tfmix is|package tfmix"),
        ("from tfmix import policy", "imports the package"),
        ("from tfmix.policy import Policy", "imports the package"),
        ("from . import policy", "relative import"),
        ("import tfmix.nothing", "not a module of tfmix"),
    ],
)
def test_imports_that_hide_their_module_are_found(copied, line, message):
    with pytest.raises(AssertionError, match=message):
        copied("loss_scaling/guard", f"{line}\n")
