"""The exceptions of failed calls: their types, attributes and pickling, and how C++ errors become exceptions."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch.distributed.rpc import internal

import torch_ucx_rpc
from torch_ucx_rpc import errors

TYPES = [getattr(errors, name) for name in errors.__all__]

LOST = "lost worker 'ps' (rank 0, pid 17 on host0): it has died or cannot be reached any more (its process has ended)"
TIMED_OUT = (
    "RPC ran for more than set timeout (250 ms) and will now be marked with an error; called worker 'ps' (rank 0, pid "
    "17 on host0)"
)
PS = {"name": "ps", "rank": 0, "host": "host0"}


def test_the_package_has_the_module() -> None:
    assert torch_ucx_rpc.errors is errors


@pytest.mark.parametrize("type_", TYPES)
def test_each_error_is_a_runtime_error_with_its_sentence(type_: type[errors.RpcError]) -> None:
    with pytest.raises(RuntimeError) as raised:
        raise type_(LOST, name="ps")
    assert isinstance(raised.value, errors.RpcError)
    assert str(raised.value) == LOST
    assert raised.value.args == (LOST,)
    assert (raised.value.name, raised.value.rank, raised.value.host, raised.value.cause) == ("ps", None, None, None)


def test_a_timeout_is_a_timeout_error_too() -> None:
    error = errors.CallTimedOut(TIMED_OUT, timeout=0.25)
    assert isinstance(error, TimeoutError)
    # An OSError has these attributes, but the text must not contain them.
    assert (error.errno, error.strerror, error.filename) == (None, None, None)
    assert str(error) == TIMED_OUT
    assert [type_ for type_ in TYPES if issubclass(type_, OSError)] == [errors.CallTimedOut, errors.JoinTimedOut]


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_errors_can_be_pickled_and_copied_with_attributes(type_: type[errors.RpcError], again) -> None:
    error = again(type_(LOST, cause="its process has ended", **PS))
    assert type(error) is type_
    assert str(error) == LOST
    assert {name: getattr(error, name) for name in (*PS, "cause")} == {**PS, "cause": "its process has ended"}


@pytest.mark.parametrize("type_", TYPES)
def test_errors_pass_through_another_worker_as_torch_sends_them(type_: type[errors.RpcError]) -> None:
    sent = pickle.loads(pickle.dumps(internal.RemoteException(f"On WorkerInfo(id=1): {LOST}", type_)))
    with pytest.raises(type_, match="On WorkerInfo") as raised:
        internal._handle_exception(sent)
    assert raised.value.name is None


def test_an_attribute_that_the_error_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="WorkerLost has no attribute resource, timeout"):
        errors.WorkerLost(LOST, timeout=1.0, resource="memory")


@pytest.mark.parametrize(
    ("kind", "what", "fields", "expected"),
    [
        ("worker_lost", LOST, {**PS, "cause": "its process has ended"}, errors.WorkerLost),
        ("worker_left", "worker 'ps' has left the group", PS, errors.WorkerLeft),
        ("shut_down", "RPC has been shut down on this worker", {}, errors.ShutDown),
        ("timed_out", TIMED_OUT, {**PS, "timeout": 0.25}, errors.CallTimedOut),
        (
            "message_refused",
            "the answer of worker 'ps' is unreadable: ...",
            {**PS, "cause": "..."},
            errors.MessageRefused,
        ),
        ("not_sent", "could not send to worker 'ps': UCX: ...", {**PS, "cause": "UCX: ..."}, errors.MessageNotSent),
        ("out_of_resources", "could not receive ...", {**PS, "resource": "memory"}, errors.OutOfResources),
        ("unknown_worker", "could not find destination worker 'x'", {"name": "x"}, errors.UnknownWorker),
        ("rref_lost", "this RRef will never have a value: ...", {**PS, "cause": "..."}, errors.RRefLost),
        ("barrier_failed", "the shutdown is over, but not all workers ...", {"cause": LOST}, errors.BarrierFailed),
        ("forked", "RPC cannot be used in a process that was forked", {}, errors.ForkedProcess),
    ],
)
def test_a_native_error_becomes_the_exception_of_its_kind(
    kind: str, what: str, fields: dict[str, object], expected: type[errors.RpcError]
) -> None:
    error = errors.from_native(kind, what, fields)
    assert type(error) is expected
    assert str(error) == what
    assert vars(error) == fields


def test_every_exception_of_an_agent_has_one_kind() -> None:
    # Python code of the package raises the other exceptions.
    others = (errors.RpcError, errors.NotRunning, errors.JoinFailed, errors.JoinTimedOut)
    assert sorted(map(id, errors.KINDS.values())) == sorted(id(type_) for type_ in TYPES if type_ not in others)


def test_an_unknown_kind_stays_torchs_runtime_error() -> None:
    assert errors.from_native("something_new", "what", {"name": "ps"}) is None


def test_fields_that_make_no_sense_do_not_hide_the_error() -> None:
    error = errors.from_native(
        "worker_lost", LOST, {"name": "", "rank": 0, "shoe_size": 43, "args": ("x",), "host": None}
    )
    assert str(error) == LOST
    assert vars(error) == {"rank": 0}
