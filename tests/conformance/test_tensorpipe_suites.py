"""PyTorch's suites for TensorPipe's agent, run on UCX instead.

The tests are torch's own, and so is the fixture. `EQUIVALENTS` lists the tests that no other agent can pass, each with
a test of this project.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    # The suites use deprecated functions of torch.
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.rpc_utils import TENSORPIPE_TESTS, generate_tests

from ._fixtures import TENSORPIPE_FIXTURES

# The suites have their own time limit, at which they end a hanging test and print its stacks.
pytestmark = [pytest.mark.timeout(0), pytest.mark.filterwarnings("default")]

for _backend, _fixture in TENSORPIPE_FIXTURES.items():
    # Generate the suites of both backends: a test's processes find its class by name. conftest.py collects the suites
    # of one backend.
    globals().update(generate_tests(_backend, _fixture, TENSORPIPE_TESTS, __name__))
