"""Finds the private names of Keras, TensorFlow and JAX in source code.

A name is found as it is written: as an import, as an underscore attribute of an
object that is not ours, or as a string. Strings count because most names in
tfmix/_keras/ are read with `vars`, `getattr` or `importlib.import_module`.
"""

import ast
import functools
import re

ROOTS = r"keras\.src|tensorflow\.(?:python|compiler)|jax\._src|jaxlib\.\w+"
_DOTTED = re.compile(rf"(?<![\w.])(?:{ROOTS})(?:\.[\w*]+)*")
# tfmix's own attributes on objects of others begin with `_tfmix_`. A star is a
# part that is only known at run time, and so is in no contract.
_UNDERSCORED = re.compile(r"_(?!tfmix_|_)[\w*]+")
_CLASS = re.compile(r"_[A-Z]")
_SCOPES = ast.Module | ast.ClassDef | ast.FunctionDef


@functools.cache
def private_names(source):
    """Returns all private names of Keras and TensorFlow in a module's code.

    Returns:
        A set of dotted names of modules and their contents, and of plain names
        for the underscore attributes of objects. Comments and docstrings do not
        count.
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    imported = _imports(nodes)
    ours = {name for name, of in imported.items() if of.startswith("tfmix.")}
    # An annotation in quotes names a class of ours.
    names = {text for text in _strings(nodes) if not _CLASS.match(text)}
    names |= set(_attributes(tree, ours | {"self", "cls"}))
    names = {name for name in names if _UNDERSCORED.fullmatch(name)}
    modules = {name: of for name, of in imported.items() if _DOTTED.match(of)}
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_import(node.value):
            (of,) = _strings(ast.walk(node.value))
            modules[ast.unparse(node.targets[0])] = of
    pairs = [pair for node in nodes for pair in _pairs(node)]
    inside = {f"{modules[of]}.{name}" for of, name in pairs if of in modules}
    texts = [*_strings(nodes), *imported.values()]
    texts += [ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)]
    dotted = {name for text in texts for name in _DOTTED.findall(text)}
    return frozenset(dotted | names | inside)


def defined(source):
    """Returns the names that a module defines, its classes' included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in {"self", "cls"}:
                found.add(node.attr)
    return found


def _imports(nodes):
    """Maps the names that imports bind to the dotted names of their modules."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {one.asname or one.name: one.name for one in node.names}
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                name = one.asname or one.name
                found[name] = f"{node.module}.{one.name}"
    return found


def _is_import(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {
        "importlib.import_module",
        "import_module",
    }


def _strings(nodes):
    """Yields the strings of code; an f-string has `*` for what it inserts."""
    nodes = list(nodes)
    constants, parts = {}, set()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(
            node.value, ast.Constant
        ):
            constants[ast.unparse(node.targets[0])] = node.value.value
        if isinstance(node, _SCOPES) and ast.get_docstring(node) is not None:
            parts.add(node.body[0].value)
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(_text(part, constants) for part in node.values)
        if isinstance(node, ast.Constant) and node not in parts:
            yield str(node.value)


def _text(part, constants):
    if isinstance(part, ast.Constant):
        return part.value
    return str(constants.get(ast.unparse(part.value), "*"))


def _attributes(node, ours):
    """Yields the attributes that are read from objects that are not ours.

    A subclass of a class of Keras or TensorFlow may read and override theirs.
    """
    if isinstance(node, ast.ClassDef):
        roots = {ast.unparse(base).partition(".")[0] for base in node.bases}
        if roots & {"keras", "tf"}:
            ours = ours - {"self", "cls"}
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            yield from (method.name for method in methods)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ours:
        yield node.attr
    for inner in ast.iter_child_nodes(node):
        yield from _attributes(inner, ours)


def _pairs(node):
    """Yields the owner and the attribute in `a.b`, `getattr` and a `Place`."""
    if isinstance(node, ast.Attribute):
        yield ast.unparse(node.value), node.attr
    is_getter = isinstance(node, ast.Call) and ast.unparse(node.func) in {
        *("getattr", "setattr", "hasattr")
    }
    both = node.args[:2] if is_getter else getattr(node, "elts", ())
    if len(both) == 2:
        is_known = isinstance(both[1], ast.Constant)
        yield ast.unparse(both[0]), both[1].value if is_known else "*"
