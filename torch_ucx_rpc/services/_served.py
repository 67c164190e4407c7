"""What this worker serves: the callee's side of calls by name."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch.futures import Future

from torch_ucx_rpc.services import _directory
from torch_ucx_rpc.services._directory import Directory, directory
from torch_ucx_rpc.services._errors import NotAMember, NotServed, text_of_not_served


class Served:
    """What this worker serves under a name."""

    __slots__ = ("calls", "errors", "group", "name", "open", "value")

    def __init__(self, name: str, value: Any, group: str | None) -> None:
        self.name = name
        self.value = value
        self.group = group
        # CPython does not switch threads within the statements that count.
        self.calls = 0
        self.open = 0
        self.errors = 0


# By name; of the agent that runs.
served: dict[str, Served] = {}


def _not_served(name: str) -> NotServed:
    return NotServed(f"{text_of_not_served(directory().info.name, name)}, or not any more")


def _find(name: str) -> Served:
    service = served.get(name)
    if service is None:
        raise _not_served(name)
    return service


def _find_for_all(name: str) -> Served:
    """For a caller that knows of no group: where there is one by now, the caller is to look again."""
    service = _find(name)
    if service.group is not None:
        raise _not_served(name)
    return service


def _find_for(name: str, caller: str) -> Served:
    service = _find(name)
    group = service.group
    if group is not None and not directory().is_in_group(caller, group):
        own = directory().info.name
        raise NotAMember(
            f"{name!r} of worker {own!r} is for the members of the group {group!r}, and worker {caller!r} is none: it "
            f"becomes one by services.join({group!r}), or by registering a name in it"
        )
    return service


def _run(service: Served, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    service.calls += 1
    service.open += 1
    try:
        return service.value(*args, **kwargs)
    except BaseException:
        service.errors += 1
        raise
    finally:
        service.open -= 1


def _run_async(service: Served, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    service.calls += 1
    service.open += 1
    try:
        future = service.value(*args, **kwargs)
        # What rpc_async returns is one of torch's own, which torch.futures.Future is made of.
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"{service.name!r} is decorated with rpc.functions.async_execution, so it must return a "
                f"torch.futures.Future; it has returned {future!r}"
            )
        future.add_done_callback(lambda done: _count_end(service, done))
    except BaseException:
        service.errors += 1
        service.open -= 1
        raise
    return future


def _count_end(service: Served, done: Future[Any]) -> None:
    service.open -= 1
    try:
        done.value()
    except Exception:
        service.errors += 1


# The functions that run on another worker. The four differ in what is known before the call, so that none of them asks.


def serve(name: str, /, *args: Any, **kwargs: Any) -> Any:
    return _run(_find_for_all(name), args, kwargs)


def serve_member(name: str, caller: str, /, *args: Any, **kwargs: Any) -> Any:
    return _run(_find_for(name, caller), args, kwargs)


@rpc.functions.async_execution
def serve_async(name: str, /, *args: Any, **kwargs: Any) -> Any:
    return _run_async(_find_for_all(name), args, kwargs)


@rpc.functions.async_execution
def serve_member_async(name: str, caller: str, /, *args: Any, **kwargs: Any) -> Any:
    return _run_async(_find_for(name, caller), args, kwargs)


def value_of(name: str, caller: str) -> Any:
    return _find_for(name, caller).value


def _begin(known: Directory) -> None:
    served.clear()


_directory.made.append(_begin)
