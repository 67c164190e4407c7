"""The lists of suites by which the installed torch tests RPC agents."""

from __future__ import annotations

import unittest
import warnings

import torch

with warnings.catch_warnings():
    # The suites use deprecated functions of torch.
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed import rpc_utils

LISTS = (
    "GENERIC_TESTS",
    "TENSORPIPE_TESTS",
    "FAULTY_AGENT_TESTS",
    "GENERIC_CUDA_TESTS",
    "TENSORPIPE_CUDA_TESTS",
)


def release(version: str) -> str:
    """Return 2.13.0 for 2.13.0+cpu: all builds of a release have the same suites."""
    return version.partition("+")[0]


def installed_release() -> str:
    return release(torch.__version__)


def installed_suites() -> dict[str, dict[str, list[str]]]:
    """Return list -> suite -> names of its tests."""
    names = unittest.defaultTestLoader.getTestCaseNames
    return {
        listed: {suite.__name__: list(names(suite)) for suite in getattr(rpc_utils, listed)}  # type: ignore[arg-type]
        for listed in LISTS
    }
