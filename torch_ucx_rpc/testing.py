"""A UCX agent that loses and delays messages on demand, to test the reaction of a program.

Importing this module adds the backend "FAULTY_UCX" to ``torch.distributed.rpc``. It is the counterpart of torch's
"FAULTY_TENSORPIPE" (``torch.distributed.rpc._testing``), with options of the same names. The package itself never
imports this module.

Example::

    >>> from torch_ucx_rpc.testing import FaultyUcxRpcBackendOptions
    >>> options = FaultyUcxRpcBackendOptions(messages_to_fail=["RREF_FORK_REQUEST"], num_fail_sends=3)
    >>> rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options)
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.rpc import backend_registry

from torch_ucx_rpc import _agent, _start
from torch_ucx_rpc._arguments import check_count, check_type, wrong_type, wrong_value
from torch_ucx_rpc._native import _C
from torch_ucx_rpc._options import Option, UcxRpcBackendOptions, check_seconds

__all__ = ["FaultyUcxRpcBackendOptions"]


_REQUEST_TYPES = "a list of request types such as 'PYTHON_CALL'"
_DELAYS = "a dict from request types such as 'PYTHON_CALL' to seconds"


def _check_names(name: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise wrong_type(name, _REQUEST_TYPES, value)
    return [_check_request_type(name, _REQUEST_TYPES, item) for item in value]


def _check_delays(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise wrong_type(name, _DELAYS, value)
    return {
        _check_request_type(name, _DELAYS, key): check_seconds(f"{name}[{key!r}]", delay)
        for key, delay in value.items()
    }


def _check_request_type(name: str, expected: str, value: Any) -> str:
    check_type(name, str, expected, value)
    if value not in _C.REQUEST_TYPES:
        raise wrong_value(name, f"of these request types: {', '.join(_C.REQUEST_TYPES)}", value)
    return str(value)


def _check_count(name: str, value: Any) -> int:
    check_count(name, 0, "a number of sends", value)
    return int(value)


class FaultyUcxRpcBackendOptions(UcxRpcBackendOptions):
    """`UcxRpcBackendOptions`, with faults.

    Args:
        messages_to_fail (list[str]): types of torch's requests that fail with RuntimeError when they are sent, such as
            ``"PYTHON_CALL"`` or ``"RREF_FORK_REQUEST"`` (default: none).
        num_fail_sends (int): number of sends of each such message that fail (default: 0). torch repeats the messages
            that manage RRefs and autograd contexts.
        messages_to_delay (dict[str, float]): seconds that requests wait at the callee before they are handled, by type
            (default: none). A waiting request occupies a thread.
        **options: options of `UcxRpcBackendOptions`.

    Raises ValueError, which lists the types, for a type of requests that does not exist.
    """

    __slots__ = ()

    messages_to_fail = Option(_check_names)
    messages_to_delay = Option(_check_delays)
    num_fail_sends = Option(_check_count)

    def __init__(
        self,
        *,
        messages_to_fail: Iterable[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.messages_to_fail = messages_to_fail
        self.messages_to_delay = {} if messages_to_delay is None else messages_to_delay
        self.num_fail_sends = num_fail_sends


class FaultyUcxRpcAgent(_agent.UcxRpcAgent, _C.FaultyUcxRpcAgent):
    """The agent for `FaultyUcxRpcBackendOptions`."""

    def __init__(self, *arguments: Any) -> None:
        *_, options = arguments
        super().__init__(
            *arguments,
            messages_to_fail=options.messages_to_fail,
            messages_to_delay=options.messages_to_delay,
            num_fail_sends=options.num_fail_sends,
        )


def construct_options(rpc_timeout: float, init_method: str, **options: Any) -> FaultyUcxRpcBackendOptions:
    """Handler of ``backend_registry.construct_rpc_backend_options``."""
    return FaultyUcxRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)


if FaultyUcxRpcBackendOptions not in _start.AGENT_TYPES:
    _start.AGENT_TYPES[FaultyUcxRpcBackendOptions] = FaultyUcxRpcAgent
    backend_registry.register_backend("FAULTY_UCX", construct_options, _start.init_backend)
