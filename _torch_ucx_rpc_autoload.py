"""Lets TORCH_UCX_RPC_REPLACE_TENSORPIPE work in programs that know nothing of torch_ucx_rpc.

torch calls `autoload` near the end of its own import, in every process and wherever the package is installed: setup.cfg
declares it as an entry point of the group ``torch.backends``. It has a module to itself, beside the package, because
importing anything of the package loads UCX.
"""

from __future__ import annotations

import functools
import os
from typing import Any

VARIABLE = "TORCH_UCX_RPC_REPLACE_TENSORPIPE"

# What leaves everything as it is. Anything else, be it "1" or a mistake, is for init_rpc to act upon.
OFF = ("", "0")


def autoload() -> None:
    """Have ``init_rpc`` load torch_ucx_rpc, if the variable is set; it then does the rest when it is imported."""
    if os.environ.get(VARIABLE, "") in OFF:
        return
    from torch.distributed import rpc

    if not rpc.is_available():
        return
    torchs_init_rpc: Any = rpc.init_rpc

    # Nobody has imported it by name yet, so a function in its place will do. UCX is loaded by processes that use RPC;
    # that torch is imported, or torch.distributed.rpc, says nothing of that.
    @functools.wraps(torchs_init_rpc)
    def init_rpc(*arguments: Any, **named: Any) -> None:
        _load()
        # With the code that torch_ucx_rpc has given it.
        torchs_init_rpc(*arguments, **named)

    rpc.init_rpc = init_rpc


def _load() -> None:
    try:
        import torch_ucx_rpc  # noqa: F401 - replaces TensorPipe, having read the variable
    except ImportError as error:
        # Going on with TensorPipe would be what the user did not want, and a job with both would not even start.
        raise ImportError(
            f"{VARIABLE}={os.environ.get(VARIABLE)}: torch_ucx_rpc cannot take the place of TensorPipe: {error}",
            name="torch_ucx_rpc",
        ) from error
