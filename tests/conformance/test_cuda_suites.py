"""PyTorch's suites for RPC with GPUs, for any agent and for TensorPipe's: ``pytest tests/conformance --cuda``.

torch's own decorators skip tests that need more GPUs.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    # The suites use deprecated functions of torch.
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.rpc_utils import (
        GENERIC_CUDA_TESTS,
        TENSORPIPE_CUDA_TESTS,
        generate_tests,
    )

from ._fixtures import FIXTURES, TENSORPIPE_FIXTURES

# The suites have their own time limit, at which they end a hanging test and print its stacks.
pytestmark = [pytest.mark.timeout(0), pytest.mark.filterwarnings("default")]

for _fixtures, _suites in ((FIXTURES, GENERIC_CUDA_TESTS), (TENSORPIPE_FIXTURES, TENSORPIPE_CUDA_TESTS)):
    for _backend, _fixture in _fixtures.items():
        # Generate the suites of both backends: a test's processes find its class by name. conftest.py collects the
        # suites of one backend.
        globals().update(generate_tests(_backend, _fixture, _suites, __name__))
