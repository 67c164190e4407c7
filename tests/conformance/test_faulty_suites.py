"""PyTorch's suites for an agent that loses and delays messages, run on the agent of ``torch_ucx_rpc.testing``.

The tests are torch's own, and so is the fixture, which gets UCX's faulty backend under the name that the tests use.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    # The suites use deprecated functions of torch.
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.rpc_utils import FAULTY_AGENT_TESTS, generate_tests

from ._faulty_fixtures import FAULTY_FIXTURES

# The suites have their own time limit, at which they end a hanging test and print its stacks.
pytestmark = [pytest.mark.timeout(0), pytest.mark.filterwarnings("default")]

for _backend, _fixture in FAULTY_FIXTURES.items():
    # Generate the suites of both backends: a test's processes find its class by name. conftest.py collects the suites
    # of one backend.
    globals().update(generate_tests(_backend, _fixture, FAULTY_AGENT_TESTS, __name__))
