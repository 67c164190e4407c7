"""The lists of suites that PyTorch runs its RPC agents through, as the installed torch has them."""

from __future__ import annotations

import unittest
import warnings

import torch

with warnings.catch_warnings():
    # The suites use what torch calls deprecated.
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
    """2.13.0 of 2.13.0+cpu: the suites are the same in every build of a release."""
    return version.partition("+")[0]


def installed_release() -> str:
    return release(torch.__version__)


def installed_suites() -> dict[str, dict[str, list[str]]]:
    """List -> suite -> names of its tests."""
    names = unittest.defaultTestLoader.getTestCaseNames
    return {
        listed: {suite.__name__: list(names(suite)) for suite in getattr(rpc_utils, listed)}  # type: ignore[arg-type]
        for listed in LISTS
    }
