"""Finds the private names of Keras, TensorFlow and JAX in source code.

A name is found as it is written: as an import, as an underscore attribute of an
object that is not ours, or as a string. Strings count because most names in
tfmix/_keras/ are read with `vars`, `getattr` or `importlib.import_module`.
"""

import ast
import functools
import re

ROOTS = r"keras\.src|tensorflow\.(?:python|compiler)|jax\._src|jaxlib\.\w+"
_DOTTED = re.compile(rf"(?<![\w.])(?:{ROOTS})(?:\.\w+)*")
_UNDERSCORED = re.compile(r"_[a-z]\w*")
# tfmix's own attributes on objects of others begin like this.
OWN_PREFIX = "_tfmix_"
# A part that is only known at run time, and so is in no contract.
UNKNOWN = "*"


def code_strings(tree, whole=False):
    """Yields the strings of a module's code, with or without f-strings."""
    left_out = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(
            node,
            ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
        )
        and ast.get_docstring(node, clean=False) is not None
    }
    if whole:
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                left_out |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in left_out:
                yield node.value


def imports(tree):
    """Yields the dotted names that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def mentions(source):
    """Returns the private modules of Keras or TensorFlow that code names.

    Comments and docstrings do not count. A composed string counts by its
    literal part.
    """
    tree = ast.parse(source)
    dotted = (
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    )
    texts = [*code_strings(tree), *imports(tree), *dotted]
    return {name for text in texts for name in _DOTTED.findall(text)}


@functools.cache
def private_names(source):
    """Returns all private names of Keras and TensorFlow in a module's code.

    Returns:
        A set of dotted names of modules and their contents, and of plain names
        for the underscore attributes of objects.
    """
    return frozenset(_Scan(ast.parse(source)).found)


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


class _Scan(ast.NodeVisitor):
    """Walks a module once; `found` holds the names."""

    def __init__(self, tree):
        self.found = set()
        self._functions = {
            node.name: node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
        }
        self._calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        # Maps names to what they are bound to: our modules, and private ones.
        self._ours, self._modules, self._constants = set(), {}, {}
        self._foreign_self = False
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(
                node.value, ast.Constant
            ):
                for target in node.targets:
                    self._constants[ast.unparse(target)] = node.value.value
        for text in code_strings(tree, whole=True):
            self._text(text)
        self.visit(tree)

    def _text(self, text):
        self.found |= {name for name in _DOTTED.findall(text)}
        if _UNDERSCORED.fullmatch(text):
            self._name(text)

    def _name(self, name):
        dunder = name.startswith("__") and name.endswith("__")
        private = name.startswith("_") and name != "_"
        if private and not dunder and not name.startswith(OWN_PREFIX):
            self.found.add(name)

    def visit_ImportFrom(self, node):
        for alias in node.names:
            bound, dotted = alias.asname or alias.name, alias.name
            dotted = f"{node.module}.{dotted}"
            if dotted.startswith("tfmix."):
                self._ours.add(bound)
            if _DOTTED.fullmatch(dotted):
                self._modules[bound] = {dotted}
                self.found.add(dotted)

    def visit_Import(self, node):
        self.found |= {a.name for a in node.names if _DOTTED.match(a.name)}

    def visit_FunctionDef(self, node):
        before = dict(self._modules)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and len(inner.targets) == 1:
                modules = self._resolve(inner.value)
                name = ast.unparse(inner.targets[0])
                if modules:
                    known = self._modules.get(name, set())
                    self._modules[name] = known | modules
        self.generic_visit(node)
        self._modules = before

    def visit_ClassDef(self, node):
        before = self._foreign_self
        roots = {ast.unparse(base).split(".")[0] for base in node.bases}
        self._foreign_self = bool(roots & {"keras", "tf"})
        if self._foreign_self:
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    self._name(inner.name)
        self.generic_visit(node)
        self._foreign_self = before

    def visit_Attribute(self, node):
        dotted = ast.unparse(node)
        if _DOTTED.fullmatch(dotted):
            self.found.add(dotted)
        for module in self._resolve(node.value):
            self.found.add(f"{module}.{node.attr}")
        base = ast.unparse(node.value)
        own = base in self._ours
        own = own or (base in {"self", "cls"} and not self._foreign_self)
        if not own:
            self._name(node.attr)
        self.generic_visit(node)

    def visit_JoinedStr(self, node):
        for text in self._texts(node):
            self._text(text)
            # `f"_{name}"` may become any attribute, so it must be declared.
            if re.fullmatch(rf"_[\w{UNKNOWN}]*\{UNKNOWN}\w*", text):
                self.found.add(text)
        self.generic_visit(node)

    def visit_Tuple(self, node):
        """Reads a `replacements.Place`, `(module, "name")`."""
        if len(node.elts) == 2:
            self._pair(*node.elts)
        self.generic_visit(node)

    def visit_Call(self, node):
        if ast.unparse(node.func) in {"getattr", "setattr", "hasattr"}:
            self._pair(*node.args[:2])
        self.generic_visit(node)

    def _pair(self, owner, attribute):
        for module in self._resolve(owner):
            for name in self._texts(attribute):
                self.found.add(f"{module}.{name}")

    def _resolve(self, node):
        """Returns the private modules that an expression may be."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id, set())
        if not isinstance(node, ast.Call):
            return set()
        function = ast.unparse(node.func)
        if function in {"importlib.import_module", "import_module"}:
            names = self._texts(node.args[0])
            return {name for name in names if _DOTTED.match(name)}
        if function == "getattr" and len(node.args) > 2:
            inner = self._resolve(node.args[0])
            names = self._texts(node.args[1])
            return {f"{module}.{name}" for module in inner for name in names}
        if function in self._functions:
            return self._returned(self._functions[function], node)
        return set()

    def _returned(self, function, call):
        """Returns the modules that a call of our functions may return."""
        values = dict(zip(_arguments(function), call.args, strict=False))
        return {
            text
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
            if ast.unparse(node.value.func) == "importlib.import_module"
            for text in self._texts(node.value.args[0], values)
            if _DOTTED.match(text)
        }

    def _texts(self, node, values=None):
        """Returns the possible values of a string; `UNKNOWN` where not known.

        The argument of a function of this module is what its callers pass.
        """
        if isinstance(node, ast.Constant):
            return {str(node.value)}
        if isinstance(node, ast.Name):
            if node.id in (values or {}):
                return self._texts(values[node.id])
            if node.id in self._constants:
                return {str(self._constants[node.id])}
            return self._passed(node.id)
        if isinstance(node, ast.FormattedValue):
            return self._texts(node.value, values)
        if isinstance(node, ast.JoinedStr):
            texts = {""}
            for part in node.values:
                ends = self._texts(part, values)
                texts = {text + end for text in texts for end in ends}
            return texts
        return {UNKNOWN}

    def _passed(self, argument):
        """Returns the constants that are passed for an argument's name."""
        texts = {
            value.value
            for name, function in self._functions.items()
            if argument in _arguments(function)
            for call in self._calls
            if ast.unparse(call.func) == name
            for value in call.args[_arguments(function).index(argument) :][:1]
            if isinstance(value, ast.Constant)
        }
        return {str(text) for text in texts} or {UNKNOWN}


def _arguments(function):
    return [argument.arg for argument in function.args.args]
