"""Every ```python block of README.md and CONTRIBUTING.md runs, and README's table of errors says what is said."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest

import minigrad as mg

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.M)
WRONG = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8").partition("## What goes wrong")[2])


def run_blocks(name, folder=None):
    """The namespace after all blocks of a file, run in order, in a folder for what they write; a traceback has the
    file's own line numbers."""
    text = (ROOT / name).read_text(encoding="utf-8")
    space = {"__name__": name}
    with contextlib.chdir(folder or "."):
        for found in BLOCK.finditer(text):
            above = text.count("\n", 0, found.start(1))
            exec(compile("\n" * above + found[1], str(ROOT / name), "exec"), space)
    return space


@pytest.fixture(scope="module")
def readme(tmp_path_factory):
    """The namespace after the blocks of README.md."""
    return run_blocks("README.md", tmp_path_factory.mktemp("readme"))


@pytest.fixture
def new_primitives():
    """The primitives a test registers, by name: filled in on the way, taken out of the table afterwards."""
    before, new = dict(mg.primitives), {}

    def look():
        new.update({name: op for name, op in mg.primitives.items() if name not in before})
        return new

    yield look
    for name in set(mg.primitives) - set(before):
        del mg.primitives[name]


@pytest.mark.parametrize("name, blocks", [("README.md", 4), ("CONTRIBUTING.md", 1)])
def test_every_block_runs(name, blocks, new_primitives, tmp_path):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) >= blocks and text.count("```") == 2 * len(BLOCK.findall(text))
    run_blocks(name, tmp_path)


def test_the_ten_lines_learn(readme):
    assert readme["loss"].item() < 0.01


def arrays_of(sample):
    """Float64 arrays for the shapes of a sample row, other arguments as they are."""
    rng = np.random.default_rng(0)
    shaped = [isinstance(a, tuple) for a in sample.args]
    return [rng.uniform(sample.low, sample.high, a) if s else a for a, s in zip(sample.args, shaped, strict=True)]


def test_the_worked_example_is_right(new_primitives):
    """The op that CONTRIBUTING.md adds passes what tests/test_ops.py asks of every op: first and second derivatives
    along a random direction against central differences, and its error rows."""
    run_blocks("CONTRIBUTING.md")
    assert new_primitives()
    for name, op in new_primitives().items():
        assert op.__doc__ and any(s.error is None for s in op.samples)
        for sample in op.samples:
            args = arrays_of(sample)
            if sample.error is not None:
                with pytest.raises((ValueError, TypeError), match=re.escape(sample.error)):
                    op(*map(mg.tensor, args), **sample.params)
                continue
            check_slope(name, lambda *xs, op=op, s=sample: projected(op(*xs, **s.params)), args)


def projected(y):
    return (y * np.random.default_rng(1).standard_normal(y.shape)).sum()


def check_slope(name, f, args, order=2, h=1e-5):
    xs = [mg.tensor(a, requires_grad=True) for a in args]
    along = [np.random.default_rng(2 + i).standard_normal(a.shape) for i, a in enumerate(args)]

    def slope(*xs):
        cts = mg.gradients(f(*xs), xs, create_graph=True)
        return sum((ct * v).sum() for ct, v in zip(cts, along, strict=True))

    up, down = (float(f(*(mg.tensor(a + s * h * v, requires_grad=True) for a, v in zip(args, along, strict=True))))
                for s in (1, -1))
    assert float(slope(*xs)) == pytest.approx((up - down) / (2 * h), rel=1e-6, abs=1e-7), f"{name}, order {3 - order}"
    if order > 1:
        check_slope(name, slope, args, order - 1, h)


@pytest.mark.parametrize("code, message", WRONG, ids=[message for _, message in WRONG])
def test_what_goes_wrong(code, message, readme):
    """The code of the row raises, and the message holds what the row quotes."""
    if "cuda" in code:
        try:
            import cupy  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("CuPy is installed: not checked: what asking for cuda says without it")
    space = readme | {"np": np, "x": mg.tensor([1.0, 2.0], requires_grad=True)}
    with pytest.raises(Exception, match=re.escape(message)):
        exec(code, space)


def test_the_table_of_errors_was_found():
    assert len(WRONG) >= 10


def test_reading_order_names_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:minigrad|examples|tests)/[\w/.]*)`", text))
    assert named and not [path for path in named if not (ROOT / path).exists()]
