"""PyTorch's suites for any agent.

The tests come from the installed wheel: none is edited, left out or tried twice.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    # The suites use what torch calls deprecated.
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.rpc_utils import GENERIC_TESTS, generate_tests

from ._fixtures import FIXTURES

# The suites end a test that hangs at their own limit, and print its stacks.
pytestmark = [pytest.mark.timeout(0), pytest.mark.filterwarnings("default")]

for _backend, _fixture in FIXTURES.items():
    # Both are generated, since the processes of a test find its class by name; conftest.py collects one of them.
    globals().update(generate_tests(_backend, _fixture, GENERIC_TESTS, __name__))
