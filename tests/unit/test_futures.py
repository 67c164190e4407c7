"""`_workers.futures`: futures that end with an exception."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch.futures import Future

from torch_ucx_rpc._workers.futures import _Failed, fail
from torch_ucx_rpc.errors import WorkerLost


class Memory:
    """Stands for the values of a frame that an exception passes through."""


def raises_midway(future: Future[Any], memory: Memory) -> None:
    """Raise like the libraries: the frames of both functions refer to the future."""

    def look_up() -> None:
        assert future is not None
        assert memory is not None
        raise KeyError("inside")

    try:
        try:
            look_up()
        except KeyError as error:
            raise ValueError("outside") from error
    except ValueError as error:
        fail(future, error)


def waits(future: Future[Any], memory: Memory) -> None:
    assert memory
    with pytest.raises(ValueError, match="outside") as raised:
        future.wait()
    assert isinstance(raised.value.__cause__, KeyError)


def calls_back(future: Future[Any], memory: Memory) -> None:
    def look(done: Future[Any]) -> None:
        assert future is not None
        assert memory is not None
        with pytest.raises(ValueError, match="outside"):
            done.value()

    future.add_done_callback(look)


@pytest.mark.parametrize("use", [waits, calls_back])
def test_a_future_that_has_failed_keeps_nothing_alive(use: Callable[[Future[Any], Memory], None]) -> None:
    memory = Memory()
    future: Future[Any] = Future()
    raises_midway(future, memory)
    use(future, memory)
    use(future, memory)
    known = weakref.ref(memory)
    del memory, future
    gc.collect()
    assert known() is None


def test_each_wait_raises_an_equal_exception() -> None:
    future: Future[Any] = Future()
    fail(future, WorkerLost("lost worker 'b'", name="b", rank=1, host="h", cause="its process has ended"))
    for _ in range(2):
        with pytest.raises(WorkerLost, match="lost worker 'b'") as raised:
            future.wait()
        assert (raised.value.name, raised.value.rank, raised.value.host) == ("b", 1, "h")


class Unlike(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_exceptions_that_cannot_be_remade_are_raised_as_they_are() -> None:
    future: Future[Any] = Future()
    fail(future, Unlike(1, 2))
    with pytest.raises(Unlike, match="1 and 2"):
        future.wait()


def test_the_value_of_a_failed_future_reads_like_its_exception() -> None:
    assert str(_Failed(ValueError("the step has failed"))) == "the step has failed"
