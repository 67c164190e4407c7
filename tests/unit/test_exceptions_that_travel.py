"""Exceptions and values that torch's pickler brings from another worker."""

from __future__ import annotations

import sys
import types

import pytest
from torch.distributed.rpc import internal

from torch_ucx_rpc import errors
from torch_ucx_rpc._torch import exceptions
from torch_ucx_rpc.pipeline._exchange import decode, encode


@pytest.mark.parametrize("message", ["x" * 100_000, "\\n".join("line" * 10_000), "short"])
def test_the_end_of_a_long_message_arrives(message: str) -> None:
    text = "Traceback (most recent call last):\n" + "a line\n" * 10_000 + f"ValueError: {message}the end"
    with pytest.raises(ValueError, match="the end"):
        exceptions.handle_exception(internal.RemoteException(text, ValueError))


@pytest.mark.parametrize(
    ("text", "arrives"),
    [
        ("KeyError('a\\nb') at\nline", "KeyError('a\nb') at\nline"),
        (r"C:\Users \x \u \N{no such name} \\d", r"C:\Users \x \u \N{no such name} \d"),
        ("Größe \\é 漢字 \U0001f600", "Größe \\é 漢字 \U0001f600"),
        ("a\0b", r"a\x00b"),
        ("lone \udc80", r"lone \udc80"),
        ("the end \\", "the end \\"),
    ],
    ids=["escapes", "backslashes", "letters", "nul", "surrogate", "end"],
)
def test_any_text_arrives_with_its_type(text: str, arrives: str) -> None:
    with pytest.raises(ArithmeticError) as raised:
        exceptions.handle_exception(internal.RemoteException(text, ArithmeticError))
    assert str(raised.value) == arrives
    again = exceptions.original(f"ArithmeticError: {arrives}\n\nAt:\n  somewhere")
    assert isinstance(again, ArithmeticError)
    assert str(again) == arrives


def test_the_text_of_a_lost_worker_makes_its_exception() -> None:
    worker = "worker 'ps' (rank 1, pid 77 on node07)"
    lost = exceptions.original(f"lost {worker}: it has died or cannot be reached any more (its process has ended)")
    assert isinstance(lost, errors.WorkerLost)
    assert (lost.name, lost.rank, lost.host, lost.cause) == ("ps", 1, "node07", "its process has ended")
    left = exceptions.original(f"{worker} has left the group")
    assert isinstance(left, errors.WorkerLeft)
    assert (left.name, left.rank, left.host) == ("ps", 1, "node07")
    assert exceptions.original(f"ValueError: lost {worker}") is None


def test_a_value_of_an_unknown_class_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = types.ModuleType("theirs")
    exec("class Value: pass", theirs.__dict__)
    theirs.Value.__module__ = "theirs"
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    encoded, _ = encode(theirs.Value())
    del theirs.Value
    with pytest.raises(AttributeError, match="Value"):
        decode(encoded)
    assert isinstance(decode(encode(AttributeError("a value"))[0]), AttributeError)
