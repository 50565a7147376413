"""Shared by all tests: a fresh stream of random numbers for each, and named skips for what is not installed."""

import importlib
import os

import numpy as np
import pytest

import minigrad as mg


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Each test starts from the same seed, so none depends on which ran before it."""
    mg.manual_seed(0)


def or_skip(module: str, part: str):
    """The module, or a skip that names the part of the suite which did not run without it; or a failure, if the
    modules in MINIGRAD_EXPECT name it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        if module.split(".")[0] in os.environ.get("MINIGRAD_EXPECT", "").split():
            pytest.fail(f"{module} is not installed, and MINIGRAD_EXPECT names it: not checked: {part}")
        pytest.skip(f"{module} is not installed: not checked: {part}")


def kernels():
    """`with kernels():` fused ops run as kernels, also where MINIGRAD_COMPOSED=1 asks for their references."""
    return mg.tape._set(composed=False)


@pytest.fixture
def torch(request):
    """PyTorch in float64 on one thread, the second oracle; without it the test is skipped, by name."""
    module = or_skip("torch", f"{request.node.originalname} against PyTorch")
    module.set_num_threads(1)
    return module


@pytest.fixture
def rng():
    return np.random.default_rng(0)
