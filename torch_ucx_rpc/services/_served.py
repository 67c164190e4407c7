"""The callee's side of calls by name."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch.futures import Future

from torch_ucx_rpc._workers.futures import answer_of
from torch_ucx_rpc.services._directory import directory
from torch_ucx_rpc.services._errors import NotServed, text_of_not_served


class Served:
    """A function or value that this worker serves under a name, and the number of its calls."""

    __slots__ = ("calls", "errors", "name", "open", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value
        # CPython does not switch threads within the counting statements.
        self.calls = self.open = self.errors = 0


def _find(name: str) -> Served:
    known = directory()
    service: Served | None = known.served.get(name)
    if service is None:
        raise NotServed(f"{text_of_not_served(known.info.name, name)}, or no longer")
    return service


# ---- The functions that run on another worker ------------------------------------------------------------------------


def value_of(name: str) -> Any:
    return _find(name).value


def serve(name: str, /, *args: Any, **kwargs: Any) -> Any:
    service = _find(name)
    service.calls += 1
    service.open += 1
    try:
        return service.value(*args, **kwargs)
    except BaseException:
        service.errors += 1
        raise
    finally:
        service.open -= 1


@rpc.functions.async_execution
def serve_async(name: str, /, *args: Any, **kwargs: Any) -> Any:
    service = _find(name)
    service.calls += 1
    service.open += 1

    def answer(done: Future[Any]) -> Any:
        service.open -= 1
        try:
            return done.value()
        except Exception as error:
            service.errors += 1
            # torch would send an exception of Future.set_exception as a result.
            return answer_of(error)

    try:
        future = service.value(*args, **kwargs)
        # rpc_async returns torch's internal type, the base of torch.futures.Future.
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"{service.name!r} is decorated with rpc.functions.async_execution, so it must return a "
                f"torch.futures.Future; it has returned {future!r}"
            )
        return future.then(answer)
    except BaseException:
        service.errors += 1
        service.open -= 1
        raise
