"""PyTorch's suites for any agent.

The tests come from the installed torch. None is edited, left out or tried twice.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    # The suites use deprecated functions of torch.
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.rpc_utils import GENERIC_TESTS, generate_tests

from ._fixtures import FIXTURES

# The suites have their own time limit, at which they end a hanging test and print its stacks.
pytestmark = [pytest.mark.timeout(0), pytest.mark.filterwarnings("default")]

for _backend, _fixture in FIXTURES.items():
    # Generate the suites of both backends: a test's processes find its class by name. conftest.py collects the suites
    # of one backend.
    globals().update(generate_tests(_backend, _fixture, GENERIC_TESTS, __name__))
