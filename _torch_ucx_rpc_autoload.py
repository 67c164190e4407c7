"""Lets TORCH_UCX_RPC_REPLACE_TENSORPIPE work in programs that do not import torch_ucx_rpc.

torch calls `autoload` near the end of its own import, in every process where the package is installed. setup.cfg
declares it as an entry point of the group ``torch.backends``. This module is beside the package, because importing
anything of the package loads UCX.
"""

from __future__ import annotations

import functools
import os
from typing import Any

# torch_ucx_rpc/_torch/replace.py has both constants too; a test compares them.
VARIABLE = "TORCH_UCX_RPC_REPLACE_TENSORPIPE"
# Values that leave everything as it is. The package reads all other values, and refuses unknown ones.
OFF = ("", "0")


def autoload() -> None:
    """If the variable is set, make ``init_rpc`` import torch_ucx_rpc, which then replaces TensorPipe."""
    if os.environ.get(VARIABLE, "") in OFF:
        return
    from torch.distributed import rpc

    if not rpc.is_available():
        return
    torchs_init_rpc: Any = rpc.init_rpc

    # Replacing the attribute is enough: torch is still being imported, so no program holds init_rpc by name yet.
    # Only init_rpc loads UCX: a process may import torch.distributed.rpc and never use it.
    @functools.wraps(torchs_init_rpc)
    def init_rpc(*arguments: Any, **named: Any) -> None:
        _load()
        # By now, torch_ucx_rpc has replaced the code of this function.
        torchs_init_rpc(*arguments, **named)

    rpc.init_rpc = init_rpc


def _load() -> None:
    try:
        import torch_ucx_rpc  # noqa: F401 - replaces TensorPipe, having read the variable
    except ImportError as error:
        # Going on with TensorPipe would ignore the user's wish, and a job with both backends would not even start.
        raise ImportError(
            f"{VARIABLE}={os.environ.get(VARIABLE)}: torch_ucx_rpc cannot take the place of TensorPipe: {error}",
            name="torch_ucx_rpc",
        ) from error
