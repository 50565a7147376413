"""The rooms of the package, lowest first: a file imports only from below itself; CuPy is named in one place; no pickle.
Read from the syntax trees, so that a lazy import inside a function counts and a word in a docstring does not."""

import ast
from pathlib import Path

import pytest

import minigrad

ROOM = Path(minigrad.__file__).parent
FILES = sorted(ROOM.rglob("*.py"))

# One line, one height; a module stands where its longest prefix here stands. Within a package (nn, kernels) any order
# without a cycle will do: Python itself refuses the cycles that matter.
ORDER = """
backend.device
backend.random backend.threads
kernels
tape
ops
ops.elementwise
ops.shape
ops.reduce
ops.linalg
ops.index
ops.softmax
ops.norm
ops.loss
ops.position
ops.random
ops.attention
ops.flops
methods
functional
nn
optim
io
data
models
train
distributed
study
""".split("\n")
HEIGHT = {name: i for i, line in enumerate(ORDER) for name in line.split()}
CUPY_ROOMS = ("backend", "kernels.cuda")


def module_name(path):
    parts = path.relative_to(ROOM).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def height(name):
    """The line of ORDER that the module stands on, a package's index on the highest of its own; None if nowhere."""
    parts = name.split(".")
    found = (HEIGHT[".".join(parts[:n])] for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in HEIGHT)
    return next(found, max((h for other, h in HEIGHT.items() if other.startswith(name + ".")), default=None))


def imports(tree, name, is_package):
    """(line, module or module.name imported), with `from minigrad.ops import shape` resolved to minigrad.ops.shape."""
    here = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = ["minigrad", *here][:len(here) + 2 - node.level]
                base = ".".join([*up, base] if base else up)
            for alias in node.names:
                inner = ROOM.joinpath(*f"{base}.{alias.name}".split(".")[1:])
                is_module = base.split(".")[0] == "minigrad" and (inner.with_suffix(".py").exists() or inner.is_dir())
                yield node.lineno, f"{base}.{alias.name}" if is_module else base


def read(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def upward_imports(name, found):
    """Of the imports found in module `name`, those from above it."""
    mine = height(name)
    for line, target in found:
        if target == "minigrad" and name:
            yield line, target                           # the index imports everything
        elif target.startswith("minigrad."):
            theirs = height(target.removeprefix("minigrad."))
            if theirs is None or theirs > mine:
                yield line, target


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_downward(path):
    name, is_package = module_name(path), path.name == "__init__.py"
    if not name:
        return                                           # minigrad/__init__.py is the index of all
    assert height(name) is not None, f"{name} has no place in ORDER"
    assert not list(upward_imports(name, imports(read(path), name, is_package)))


def test_the_reader_sees_upward_imports():
    """Each way to write one; and a downward one passes."""
    cases = {
        "import minigrad.ops.shape": 1, "from minigrad.ops import shape": 1, "from minigrad.ops.shape import pad": 1,
        "def f():\n    from minigrad import functional": 1, "from . import functional": 1,
        "from .ops.shape import pad": 1,
        "import minigrad": 1, "from minigrad import Tensor": 1,
        "from minigrad.backend.device import xp": 0, "import numpy": 0, "from .backend import device": 0,
    }
    for text, count in cases.items():
        assert len(list(upward_imports("tape", imports(ast.parse(text), "tape", False)))) == count, text
    assert list(upward_imports("ops.elementwise", [(1, "minigrad.ops.reduce")]))
    assert not list(upward_imports("ops.reduce", [(1, "minigrad.ops.elementwise")]))
    assert not list(upward_imports("ops.attention", [(1, "minigrad.kernels.numpy.attention")]))


def names_cupy(tree):
    """Lines that import CuPy or use a name or attribute called so; a string such as the backend key "cupy" is none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(a.name.split(".")[0] in ("cupy", "cupyx") for a in node.names):
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("cupy", "cupyx"):
            yield node.lineno
        elif isinstance(node, ast.Name) and node.id in ("cupy", "cupyx", "cp"):
            yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in ("cupy", "cupyx"):
            yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            if any(isinstance(a, ast.Constant) and str(a.value).startswith("cupy") for a in node.args):
                yield node.lineno
        elif (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "modules"
              and isinstance(node.slice, ast.Constant) and str(node.slice.value).startswith("cupy")):
            yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_cupy_is_named_in_the_backend_only(path):
    if not module_name(path).startswith(CUPY_ROOMS):
        assert not list(names_cupy(read(path)))


def test_the_reader_sees_cupy():
    for text in ("import cupy", "import cupy.cuda as c", "from cupyx.scipy import special", "x = cupy.ones(2)",
                 "importlib.import_module('cupy')", "sys.modules['cupy']"):
        assert list(names_cupy(ast.parse(text))), text
    assert not list(names_cupy(ast.parse("kernels = {'cupy': run}\n'''cupy'''\nb = 'cupy'")))
    assert list(names_cupy(read(ROOM / "backend" / "device.py")))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_nothing_is_pickled(path):
    """No import of pickle or of what pickles; no eval or exec of a file's text."""
    tree = read(path)
    modules = {target.split(".")[0] for _, target in imports(tree, module_name(path), path.name == "__init__.py")}
    assert not modules & {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec"}
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "allow_pickle"]
    assert all(isinstance(k.value, ast.Constant) and k.value.value is False for k in loads)


def test_core_imports_nothing_heavy():
    """NumPy and safetensors are the only libraries the package needs to be imported."""
    import subprocess
    import sys

    code = ("import sys, minigrad; print([m for m in ('torch', 'matplotlib', 'tqdm', 'cupy', 'scipy', 'pandas') "
            "if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOM.parent, check=True)
    assert done.stdout.strip() == "[]"
