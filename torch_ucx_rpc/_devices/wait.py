"""`wait`, with which the thread, and not only its streams, can wait for a value on devices."""

from __future__ import annotations

from typing import TypeVar

import torch

from torch_ucx_rpc._arguments import check_flag, got
from torch_ucx_rpc._native import _C

T = TypeVar("T")


def wait(future: torch.futures.Future[T], *, blocking: bool = False) -> T:
    """Wait for a future, and optionally for the data of its value on devices.

    ``future.wait()`` returns once the value is known, and orders the current streams after its data: a GPU may still be
    writing them. With ``blocking`` the thread waits for the data, as the host must before it reads, measures or shares
    them without torch.

    Args:
        future (torch.futures.Future): a future of ``rpc_async``, ``then`` or any other, on any backend.
        blocking (bool): also waits for the current stream of each device of the future, and so for all earlier work of
            this stream (default: False, as ``future.wait()``). It has no effect on a future without devices.

    Returns the future's value.

    Raises the future's exception. Raises RuntimeError if one of the devices has failed, and TypeError for anything but
    one future.

    Example::

        >>> future = rpc.rpc_async("ps", torch.mm, (a, b))  # of CUDA tensors
        >>> product = torch_ucx_rpc.wait(future, blocking=True)

    https://github.com/pytorch/pytorch/pull/50047 proposed this choice, for the futures of
    https://github.com/pytorch/pytorch/issues/48305.
    """
    if not isinstance(future, torch._C.Future):
        raise TypeError(
            f"future must be one torch.futures.Future; {got(future)}. Wait for several one after the other."
        )
    check_flag("blocking", blocking)
    value = future.wait()
    if blocking:
        for device in _C.devices_of(future):
            torch.get_device_module(device).current_stream(device).synchronize()
    return value
