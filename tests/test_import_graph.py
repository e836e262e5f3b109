"""The layout: imports between our modules point downwards and form no cycle."""

import ast
import graphlib
import inspect

import pytest

from tests.tree import ROOT

PACKAGE = ROOT / "tfmix"

# From the bottom up. A name stands for itself and what is below it; the most
# specific one counts, so `step` is lower than `scaling`.
LAYERS = (
    (
        "_arguments",
        "_bad_rows",
        "_bar_output",
        "_context_values",
        "_errors",
        "_users_code",
        "_formats",
        "_h200",
        "_messages",
        "_progress",
        "_tables",
    ),
    ("_keras", "devices"),
    ("policy",),
    ("step",),
    ("variables",),
    ("scaling",),
    ("float8",),
    ("in_force", "in_force.process_wide"),
    ("in_force.layer",),
    ("in_force.model",),
    ("in_force.global_policy",),
    ("conversion", "data", "float32_head"),
    ("doctor", "hardware", "plotting"),
    ("callbacks", "demo"),
    ("commands",),
    ("cli",),
    ("__init__", "__main__"),
)
# The public function `tfmix.devices` hides the module of the same name once
# `import tfmix` is through, so a late `from tfmix import devices` would get the
# one or the other by chance.
HIDDEN = {"devices"}
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules(package):
    """Maps dotted names to files; a package is `name.__init__`."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts): path
        for path in sorted(package.rglob("*.py"))
    }


def imports(path, names):
    """Returns the modules of ours that a file imports, anywhere in it."""
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
                assert _strip(dotted) not in HIDDEN, (
                    f"{path}: write `from {dotted} import ...`, the function "
                    "of the module's name hides it"
                )
                if not {_strip(dotted), f"{_strip(dotted)}.__init__"} & names:
                    dotted = node.module
                found.add(_target(dotted, names, path))
    return found


def _ours(dotted):
    return dotted.split(".")[0] == "tfmix"


def _strip(dotted):
    return dotted.removeprefix("tfmix").removeprefix(".")


def _target(dotted, names, path):
    """Names the module; a package stands for its `__init__`."""
    name = _strip(dotted)
    if name in names:
        return name
    package = f"{name}.__init__" if name else "__init__"
    assert package in names, f"{path}: {dotted} is no module of tfmix"
    # Only the top reads the packages' re-exports; see style.md, habit 8.
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
    # Raises CycleError, which names the cycle.
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


def test_the_names_that_hide_their_module_are_known():
    import tfmix

    functions = {
        name
        for name in tfmix.__all__
        if not inspect.ismodule(getattr(tfmix, name))
    }
    assert functions & set(modules(PACKAGE)) == HIDDEN


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A package with our layout, to inject faults into."""
    for name in ("policy", "scaling"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('"""Empty."""\n')
    (tmp_path / "_formats.py").write_text("import math\n")
    (tmp_path / "devices.py").write_text("from tfmix import _formats\n")
    (tmp_path / "policy" / "policy.py").write_text(
        "from tfmix.devices import devices\n"
    )
    (tmp_path / "scaling" / "guard.py").write_text("import tfmix._formats\n")
    (tmp_path / "__init__.py").write_text("from tfmix import policy\n")
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    return tmp_path


def test_the_copied_layout_passes(copied):
    graph = graph_of(copied)
    check_no_cycle(graph)
    check_downwards(graph)
    assert graph["policy.policy"] == {"devices"}
    assert graph["scaling.guard"] == {"_formats"}


def test_an_injected_cycle_is_found(copied):
    (copied / "scaling" / "guard.py").write_text(
        "from tfmix.policy import policy\n"
    )
    (copied / "policy" / "policy.py").write_text(
        "def late():\n    from tfmix.scaling import guard\n"
    )
    with pytest.raises(graphlib.CycleError, match="policy.policy"):
        check_no_cycle(graph_of(copied))


def test_an_injected_upward_arrow_is_found(copied):
    (copied / "devices.py").write_text("from tfmix.policy.policy import f\n")
    with pytest.raises(AssertionError, match="devices -> policy.policy"):
        check_downwards(graph_of(copied))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import tfmix", "our own __init__"),
        ("from tfmix import Policy", "tfmix is|package tfmix"),
        ("from tfmix import policy", "imports the package"),
        ("from tfmix.policy import Policy", "imports the package"),
        ("from . import policy", "relative import"),
        ("import tfmix.nothing", "no module of tfmix"),
        ("from tfmix import devices", "from tfmix.devices import"),
    ],
)
def test_imports_that_hide_their_module_are_found(copied, line, message):
    (copied / "scaling" / "guard.py").write_text(f"{line}\n")
    with pytest.raises(AssertionError, match=message):
        graph_of(copied)


def test_a_module_in_no_layer_is_found(copied):
    (copied / "elsewhere.py").write_text("import math\n")
    with pytest.raises(AssertionError, match="elsewhere is in no layer"):
        check_downwards({**graph_of(copied), "elsewhere": {"_formats"}})
