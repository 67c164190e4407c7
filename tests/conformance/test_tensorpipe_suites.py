"""PyTorch's suites for TensorPipe's agent, with UCX in its place.

The tests are torch's own, and so is the fixture. `EQUIVALENTS` lists the tests that no other agent can pass, each with
a test of this project.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    # The suites use what torch calls deprecated.
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.rpc_utils import TENSORPIPE_TESTS, generate_tests

from ._fixtures import TENSORPIPE_FIXTURES

# The suites end a test that hangs at their own limit, and print its stacks.
pytestmark = [pytest.mark.timeout(0), pytest.mark.filterwarnings("default")]

for _backend, _fixture in TENSORPIPE_FIXTURES.items():
    # Both are generated, since the processes of a test find its class by name; conftest.py collects one of them.
    globals().update(generate_tests(_backend, _fixture, TENSORPIPE_TESTS, __name__))
