"""Decorators of tests whose body runs in the workers, and the transports of these tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from ._worker import Transport

over_shared_memory = pytest.mark.parametrize(
    "transport", [Transport.SHARED_MEMORY], indirect=True, ids=["shared_memory"]
)
"""Decorator of a test whose subject is above the transports: it runs once."""


def in_every_worker(of: int, **job: Any) -> Callable[[Callable[[int], None]], Callable[..., None]]:
    """The test ``def test_...(rank)`` runs in every worker of a job with ``of`` workers.

    ``job`` are arguments of `run_workers`. The test runs over each transport, by the fixture ``run_workers``.
    """

    def decorate(body: Callable[[int], None]) -> Callable[..., None]:
        def test(run_workers: Callable[..., list]) -> None:
            __tracebackhide__ = True
            run_workers(of, _Body(body), **job)

        # functools.wraps would make pytest look for a fixture named rank.
        test.__name__, test.__qualname__ = body.__name__, body.__qualname__
        test.__module__, test.__doc__ = body.__module__, body.__doc__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def in_worker0(of: int, **job: Any) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """The test ``def test_...()`` runs in worker0 of a job with ``of`` workers; the others serve its calls."""

    def decorate(body: Callable[[], None]) -> Callable[..., None]:
        def in_worker(rank: int) -> None:
            if rank == 0:
                body()

        in_worker.__name__, in_worker.__qualname__ = body.__name__, body.__qualname__
        in_worker.__module__, in_worker.__doc__ = body.__module__, body.__doc__
        return in_every_worker(of, **job)(in_worker)

    return decorate


class _Body:
    """The body of a decorated test, as sent to the workers: its name in the module is the test's."""

    def __init__(self, body: Callable[[int], None]) -> None:
        self._body = body

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _find_body, (self._body.__module__, self._body.__name__)


def _find_body(module: str, name: str) -> Callable[[int], None]:
    body: Callable[[int], None] = getattr(importlib.import_module(module), name).body
    return body
