"""Names while workers are busy, leave during calls, or are interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed.rpc as rpc
from torch.futures import Future

from tests.support.workers import Steps, agent, backend_options, eventually, init_rpc
from torch_ucx_rpc import services
from torch_ucx_rpc.errors import ShutDown
from torch_ucx_rpc.services import UnknownName, _directory, _served
from torch_ucx_rpc.services._directory import Directory

RunWorkers = Callable[..., list]


def own_name() -> str:
    return rpc.get_worker_info().name


def offered() -> set[str]:
    return {service.name for service in services.names()}


def test_busy_worker_hears_of_changes_later(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, miss_changes, Steps(tmp_path), options={"num_worker_threads": 1, "max_worker_threads": 1})


def keep_busy(steps: Steps) -> None:
    steps.done("busy")
    steps.wait_for("changed")


def miss_changes(rank: int, steps: Steps) -> None:
    if rank == 0:
        services.register("old", own_name)
        # A message that is not received in this time no longer counts.
        _directory.LIMIT_S = 0.1
        steps.done("old")
        steps.wait_for("called")
        busy = rpc.rpc_async("worker1", keep_busy, (steps,))
        steps.wait_for("busy")
        services.unregister("old")
        services.register("new", own_name)
        steps.done("changed")
        busy.wait()
    else:
        steps.wait_for("old")
        assert services.call("old") == "worker0"
        steps.done("called")
        steps.wait_for("changed")
        # The worker does not ask. The decider reports to it.
        eventually(lambda: set(_directory.directory().owners["worker0"].offers) == {"new"}, "it has heard")
        with pytest.raises(UnknownName):
            services.call("old")
    steps.done(f"over {rank}")
    steps.wait_for("over 0", "over 1")


def test_an_update_that_a_worker_refuses_comes_again(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, refuse_an_update, Steps(tmp_path))


def refuse_an_update(rank: int, steps: Steps) -> None:
    if rank == 1:
        hear = _directory._hear

        def refuse_once(update: _directory.Update) -> _directory.Position:
            _directory._hear = hear
            raise RuntimeError("no room")

        services.names()
        _directory._hear = refuse_once
        steps.done("refuses")
        eventually(lambda: "name" in _directory.directory().owners["worker0"].offers, "it has heard")
        assert _directory._hear is hear
    else:
        steps.wait_for("refuses")
        services.register("name", own_name)
    steps.meet("over", rank, 2)


def be_deaf() -> None:
    """Drop messages that the decider sends unasked."""
    _directory._hear = lambda update: update.at  # type: ignore[assignment]


def test_a_worker_without_reports_finds_moved_names(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(4, hand_over_a_name, Steps(tmp_path))


def hand_over_a_name(rank: int, steps: Steps) -> None:
    if rank == 1:
        services.pair("seat", 1)
        services.register("name", own_name)
    steps.meet("paired", rank, 4)
    assert services.get("seat").to_here() == 1
    assert services.call("name") == "worker1"
    if rank == 3:
        be_deaf()
    steps.meet("known", rank, 4)
    if rank == 1:
        services.unregister("seat")
        services.unregister("name")
    steps.meet("given up", rank, 4)
    if rank == 2:
        services.pair("seat", 2)
        services.register("name", own_name)
    steps.meet("taken", rank, 4)
    assert services.get("seat").to_here() == 2
    assert services.call_async("name").wait() == "worker2"
    assert services.call("name") == "worker2"
    steps.meet("found", rank, 4)


def test_no_idempotent_call_fails_when_replicas_leave(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(4, leave_while_called, Steps(tmp_path), (tmp_path / "store").as_uri(), init=False)


def leave_while_called(rank: int, steps: Steps, url: str) -> None:
    init_rpc(rank, world_size=None, rpc_backend_options=backend_options(init_method=url))
    if rank:
        services.register("name", own_name, idempotent=True)
        steps.done(f"there {rank}")
        if rank == 3:
            steps.wait_for("called", timeout=60)
        else:
            steps.wait_for(f"leave {rank}", timeout=60)
        rpc.shutdown()
        return
    steps.wait_for("there 1", "there 2", "there 3")
    answers = []
    for number in range(1000):
        if number in (200, 500):
            steps.done(f"leave {1 if number == 200 else 2}")
        call = services.call_async("name")
        answers.append(services.call("name"))
        answers.append(call.wait())
    assert set(answers) == {"worker1", "worker2", "worker3"}
    eventually(lambda: {services.call("name") for _ in range(9)} == {"worker3"}, "the last one is called")
    steps.done("called")
    rpc.shutdown()


def test_a_service_that_no_worker_of_a_role_offers_is_unknown(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, call_a_role_without_the_service, Steps(tmp_path), init=False)


def call_a_role_without_the_service(rank: int, steps: Steps) -> None:
    init_rpc(rank, name=("trainer0", "evaluator0")[rank])
    if rank == 1:
        services.register("score", own_name)
    else:
        services.wait_for("score")
        assert services.call_role("evaluator", "score")[0].wait() == "evaluator0"
        with pytest.raises(UnknownName, match=r"no living worker of the role 'trainer' offers 'score'.*'evaluator0'"):
            services.call_role("trainer", "score")
    steps.meet("over", rank, 2)
    rpc.shutdown()


def test_refusal_inside_a_service_calls_no_other_replica(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, call_what_is_refused_within, Steps(tmp_path))


_executed: list[str] = []


def ask_for_what_is_gone() -> None:
    _executed.append(own_name())
    # Call like a worker whose route is older than the unregistering.
    rpc.rpc_sync("worker0", _served.serve, args=("gone",))


def executed() -> list[str]:
    return _executed


def call_what_is_refused_within(rank: int, steps: Steps) -> None:
    if rank:
        services.register("outer", ask_for_what_is_gone)
    steps.meet("registered", rank, 3)
    if rank == 0:
        for call in (services.call, lambda name: services.call_async(name).wait()):
            with pytest.raises(RuntimeError, match="'worker0' offers no 'gone'"):
                call("outer")
        assert sum(len(rpc.rpc_sync(f"worker{other}", executed)) for other in (1, 2)) == 2
    steps.meet("over", rank, 3)


def test_a_new_life_has_offered_nothing_yet(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(1, live_twice, (tmp_path / "store").as_uri(), init=False)


def live_twice(rank: int, url: str) -> None:
    def enter() -> None:
        init_rpc(rank, world_size=None, rpc_backend_options=backend_options(init_method=url))

    enter()
    services.register("name", own_name)
    former = agent()
    rpc.shutdown()
    enter()
    assert services.statistics() == ()
    services.pair("value", 1)
    assert [service.name for service in services.statistics()] == ["value"]
    del former
    rpc.shutdown()


# ------------------------------------------------------------------------------------------------ threads of one worker


def test_a_thread_cannot_unregister_a_name_being_registered(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, unregister_too_early, Steps(tmp_path))


def unregister_too_early(rank: int, steps: Steps) -> None:
    if rank == 1:
        known = _directory.directory()
        change, begun, go_on = known.change, threading.Event(), threading.Event()

        def change_later(**what: Any) -> None:
            if what.get("added"):
                begun.set()
                assert go_on.wait(30)
            change(**what)

        known.change = change_later  # type: ignore[method-assign]
        registering = threading.Thread(target=services.register, args=("name", own_name))
        registering.start()
        assert begun.wait(30)
        with pytest.raises(UnknownName, match="'worker1', does not offer 'name'; it offers nothing"):
            services.unregister("name")
        go_on.set()
        registering.join()
    steps.meet("registered", rank, 2)
    assert services.call("name") == "worker1"
    steps.meet("over", rank, 2)


def test_a_stopped_watch_is_not_called_again(run_on_both: RunWorkers) -> None:
    run_on_both(1, stop_watching)


def stop_watching(rank: int) -> None:
    told, is_told, go_on = [], threading.Event(), threading.Event()

    def on_change(service: services.Service) -> None:
        told.append(service.workers)
        is_told.set()
        assert go_on.wait(30)

    stop = services.watch("name", on_change)
    assert is_told.wait(30)
    services.register("name", own_name)
    stop()
    go_on.set()
    # Reports come one after the other, so a report to the first watch would be in the list by now.
    is_told.clear()
    services.watch("name", on_change)
    assert is_told.wait(30)
    assert told == [(), ("worker0",)]


# -------------------------------------------------------------------------------------------- which service is called


def test_call_role_finds_a_service_registered_just_before(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, call_a_role_before_it_is_told, Steps(tmp_path))


def call_a_role_before_it_is_told(rank: int, steps: Steps) -> None:
    if rank == 2:
        be_deaf()
    steps.meet("deaf", rank, 3)
    if rank == 1:
        services.register("score", own_name)
    steps.meet("registered", rank, 3)
    if rank == 2:
        assert [future.wait() for future in services.call_role("worker", "score")] == ["worker1"]
    steps.meet("over", rank, 3)


@rpc.functions.async_execution
def answer_at_once() -> int:
    return 3


def test_a_service_that_is_to_answer_later_must_return_a_future(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, answer_at_once_by_mistake, Steps(tmp_path))


def answer_at_once_by_mistake(rank: int, steps: Steps) -> None:
    if rank == 1:
        services.register("wrong", answer_at_once)
    steps.meet("registered", rank, 2)
    if rank == 0:
        with pytest.raises((TypeError, RuntimeError), match=r"'wrong' .* must return a torch\.futures\.Future; .* 3"):
            services.call("wrong")
    else:
        eventually(lambda: services.statistics()[0].errors == 1, "it counts as an error")
        assert services.statistics()[0].open == 0
    steps.meet("over", rank, 2)


@rpc.functions.async_execution
def pass_on(name: str) -> Future[Any]:
    return services.call_async(name)


@rpc.functions.async_execution
def fail_later() -> Future[Any]:
    future: Future[Any] = Future()
    threading.Timer(0.05, future.set_exception, (KeyError("later"),)).start()
    return future


def raise_at_once() -> None:
    raise KeyError("at once")


def test_a_service_that_fails_later_raises_at_its_caller(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, fail_in_a_future, Steps(tmp_path))


def fail_in_a_future(rank: int, steps: Steps) -> None:
    if rank == 1:
        services.register("behind", raise_at_once, idempotent=True)
        services.register("later", fail_later)
    if rank == 2:
        services.register("gateway", pass_on, idempotent=True)
    steps.meet("registered", rank, 3)
    if rank == 0:
        for name, arguments, text in (("gateway", ("behind",), "at once"), ("later", (), "later")):
            with pytest.raises(RuntimeError, match=rf"KeyError.*{text}"):
                services.call(name, *arguments)
        with pytest.raises(RuntimeError, match=r"KeyError.*at once"):
            rpc.rpc_sync("worker2", pass_on, args=("behind",))
    steps.meet("called", rank, 3)
    if rank > 0:
        counts = {each.name: (each.calls, each.errors, each.open) for each in services.statistics()}
        assert counts == ({"behind": (2, 2, 0), "later": (1, 1, 0)} if rank == 1 else {"gateway": (1, 1, 0)})


def test_a_wait_without_a_timeout_ends_with_rpc(run_on_both: RunWorkers) -> None:
    run_on_both(1, wait_until_the_shutdown, shutdown=False)


def wait_until_the_shutdown(rank: int) -> None:
    sync = Directory.sync

    def sync_before_the_end(known: Directory, patience: float | None = None) -> None:
        sync(known, patience)
        threading.Timer(0.5, rpc.shutdown).start()

    with mock.patch.object(Directory, "sync", sync_before_the_end), pytest.raises(ShutDown):
        services.wait_for("nothing", timeout=0)
