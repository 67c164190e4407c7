"""The library tests run on both backends: the libraries are plain users of torch.distributed.rpc."""

from __future__ import annotations

import pytest
from _jobs import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen
