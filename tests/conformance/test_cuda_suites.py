"""PyTorch's suites for RPC with GPUs, generic and TensorPipe's, for ``pytest tests/conformance --cuda``.

torch's own decorators skip tests that need more GPUs.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    # The suites use what torch calls deprecated.
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.rpc_utils import (
        GENERIC_CUDA_TESTS,
        TENSORPIPE_CUDA_TESTS,
        generate_tests,
    )

from ._fixtures import FIXTURES, TENSORPIPE_FIXTURES

# The suites end a test that hangs at their own limit, and print its stacks.
pytestmark = [pytest.mark.timeout(0), pytest.mark.filterwarnings("default")]

for _fixtures, _suites in ((FIXTURES, GENERIC_CUDA_TESTS), (TENSORPIPE_FIXTURES, TENSORPIPE_CUDA_TESTS)):
    for _backend, _fixture in _fixtures.items():
        # Both are generated, since the processes of a test find its class by name; conftest.py collects one of them.
        globals().update(generate_tests(_backend, _fixture, _suites, __name__))
