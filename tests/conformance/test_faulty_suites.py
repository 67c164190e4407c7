"""PyTorch's suites for an agent that loses and delays messages, on the one in ``torch_ucx_rpc.testing``.

The tests are torch's own, and so is the fixture.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    # The suites use what torch calls deprecated.
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.rpc_utils import FAULTY_AGENT_TESTS, generate_tests

from ._faulty_fixtures import FAULTY_FIXTURES

# The suites end a test that hangs at their own limit, and print its stacks.
pytestmark = [pytest.mark.timeout(0), pytest.mark.filterwarnings("default")]

for _backend, _fixture in FAULTY_FIXTURES.items():
    # Both are generated, since the processes of a test find its class by name; conftest.py collects one of them.
    globals().update(generate_tests(_backend, _fixture, FAULTY_AGENT_TESTS, __name__))
