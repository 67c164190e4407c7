"""Names of services, their owners and their callers, also while workers join, leave and die."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support.workers import Steps, eventually, init_rpc
from torch_ucx_rpc import services
from torch_ucx_rpc.errors import NotRunning, WorkerLost
from torch_ucx_rpc.services import NameTaken, ReplicasLost, UnknownName
from torch_ucx_rpc.services._api import role_of
from torch_ucx_rpc.services._directory import Directory

from ._jobs import KILLED, die

RunWorkers = Callable[..., list]


_gate = threading.Event()
_at_gate: list[str] = []


def own_name() -> str:
    return rpc.get_worker_info().name


def double(x: Any) -> Any:
    return 2 * x


def raise_key_error(key: str) -> None:
    raise KeyError(key)


def wait_at_gate() -> str:
    _at_gate.append(own_name())
    assert _gate.wait(30)
    return own_name()


def at_gate() -> int:
    return len(_at_gate)


def open_gate() -> None:
    _gate.set()


def offered() -> set[str]:
    return {service.name for service in services.names()}


# ------------------------------------------------------------------------------------------------------ ordinary use


def test_the_program_of_the_page_runs(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, do_what_the_page_shows, Steps(tmp_path))


class Model:
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


loaded: list[int] = []


def load(number: int) -> str:
    loaded.append(number)
    return own_name()


def do_what_the_page_shows(rank: int, steps: Steps) -> None:
    model = Model()
    if rank:
        services.register("score", model.score, idempotent=True)
    if rank == 2:
        services.pair("weights", torch.arange(3.0))

    assert services.wait_for("score", replicas=2).workers == ("worker1", "worker2")
    services.wait_for("weights")
    x = torch.ones(4)
    assert services.call("score", x) == 4
    assert services.call_async("score", x).wait() == 4
    rref = services.get("weights")
    assert torch.equal(rref.to_here(), torch.arange(3.0))
    assert rref.owner().name == "worker2"
    assert torch.futures.wait_all(services.call_role("worker", load, args=(rank,))) == [f"worker{n}" for n in range(3)]
    steps.meet("called", rank, 3)
    assert sorted(loaded) == [0, 1, 2]

    assert [member.name for member in services.members(role="worker")] == ["worker0", "worker1", "worker2"]
    assert services.members()[2].services == ("score", "weights")
    assert services.members(role="driver") == []
    del rref
    steps.meet("done", rank, 3)


def test_registered_name_can_be_called_everywhere_at_once(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, register_and_call, Steps(tmp_path))


def register_and_call(rank: int, steps: Steps) -> None:
    for turn in range(20):
        if turn % 3 == rank:
            services.register(f"double {turn}", double)
            steps.done(f"turn {turn}")
        steps.wait_for(f"turn {turn}")
        assert services.call(f"double {turn}", rank) == 2 * rank
    steps.meet("done", rank, 3)


def test_a_watch_reports_every_change(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, watch_a_name, Steps(tmp_path))


def watch_a_name(rank: int, steps: Steps) -> None:
    seen: list[tuple[str, ...]] = []
    if rank == 0:
        services.watch("score", lambda service: seen.append(service.workers))
        services.watch("other", lambda _: 1 / 0)
        eventually(lambda: seen == [()], "the first call tells how it is")
        steps.done("watching")
        eventually(lambda: seen == [(), ("worker1",)], "it is told of the registration")
        services.register("score", double)
        eventually(lambda: seen[-1] == ("worker0", "worker1"), "it is told of itself")
        steps.done("replicated")
        eventually(lambda: seen == [(), ("worker1",), ("worker0", "worker1"), ("worker0",)], "it is told of the end")
        steps.done("seen")
    else:
        steps.wait_for("watching")
        services.register("score", double)
        steps.wait_for("replicated")
        services.unregister("score")
        steps.wait_for("seen")


def test_the_least_loaded_replica_is_called(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, load_a_replica, Steps(tmp_path))


def load_a_replica(rank: int, steps: Steps) -> None:
    if rank:
        services.register("wait", wait_at_gate)
        services.register("name", own_name)
    steps.meet("registered", rank, 3)
    if rank == 0:
        first = services.call_async("wait")
        # One replica now has an open call, so calls go to the other one.
        names = {services.call("name") for _ in range(10)}
        assert len(names) == 1
        second = services.call_async("wait")
        for worker in ("worker1", "worker2"):
            rpc.rpc_sync(worker, open_gate)
        assert {first.wait()} == {"worker1", "worker2"} - names
        assert {second.wait()} == names
        # Replicas with the same load take turns.
        assert [services.call("name") for _ in range(4)].count("worker1") == 2
    steps.meet("done", rank, 3)


@rpc.functions.async_execution
def later(x: int) -> torch.futures.Future:
    return rpc.rpc_async(own_name(), double, args=(x,))


def test_services_may_answer_later_and_their_errors_are_raised(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, answer_later_and_raise, Steps(tmp_path))


def answer_later_and_raise(rank: int, steps: Steps) -> None:
    if rank == 1:
        services.register("later", later)
        services.register("fail", raise_key_error)
    steps.meet("registered", rank, 2)
    if rank == 0:
        assert services.call("later", 4) == 8
        for call in (services.call, lambda *args: services.call_async(*args).wait()):
            with pytest.raises(RuntimeError, match=r"KeyError.*missing"):
                call("fail", "missing")
        with pytest.raises(RuntimeError, match=r"unexpected keyword argument|argument 'y'"):
            services.call("fail", y=1)
        # The service gets all keywords except the timeout.
        assert services.call("later", timeout=10, x=2) == 4
    steps.meet("called", rank, 2)
    if rank == 1:
        later_counts, fail_counts = services.statistics()[1], services.statistics()[0]
        assert (later_counts.name, later_counts.calls, later_counts.errors, later_counts.open) == ("later", 2, 0, 0)
        assert (fail_counts.name, fail_counts.calls, fail_counts.errors) == ("fail", 3, 3)
        assert fail_counts.replicas == ("worker1",)


def test_top_and_prometheus_show_services(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, look_at_services, Steps(tmp_path), options={"prometheus_port": 0})


def look_at_services(rank: int, steps: Steps) -> None:
    import torch_ucx_rpc

    services.register("double", double)
    services.register("fail", raise_key_error)
    steps.meet("registered", rank, 2)
    if rank == 0:
        for _ in range(6):
            services.call("double", 2)
        services.unregister("fail")
        with pytest.raises(RuntimeError):
            services.call("fail", "on purpose")
    steps.meet("called", rank, 2)
    if rank == 1:
        double_counts, fail_counts = torch_ucx_rpc.statistics().services
        assert double_counts == torch_ucx_rpc.ServiceStatistics(
            name="double", replicas=("worker0", "worker1"), calls=3, errors=0, open=0
        )
        assert (fail_counts.calls, fail_counts.errors, fail_counts.replicas) == (1, 1, ("worker1",))
        port = torch_ucx_rpc.statistics().prometheus_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        labels = 'rank="1",service="fail",worker="worker1"'
        assert f"torch_ucx_rpc_service_errors_total{{{labels}}} 1.0" in text
        assert f"torch_ucx_rpc_service_calls_total{{{labels}}} 1.0" in text
        assert 'torch_ucx_rpc_service_replicas{rank="1",service="double",worker="worker1"} 2.0' in text
        code, shown = command_line("top", "--once", "--json", "--pid", str(os.getpid()))
        assert code == 0
        assert json.loads(shown)["1"]["services"][0]["calls"] == 3
        code, shown = command_line("top", "--once", "--services", "--pid", str(os.getpid()))
        assert code == 0
        assert re.search(r"double +worker0 +2 +3 +0 +0", shown)
        assert re.search(r"fail +worker1 +1 +1 +0 +1", shown)
    steps.meet("looked", rank, 2)


def command_line(*arguments: str) -> tuple[int, str]:
    from _torch_ucx_rpc_cli import main

    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(arguments)
    return code, output.getvalue()


# --------------------------------------------------------------------------------------------------------- bad input


def test_a_name_that_is_taken_is_refused_saying_by_whom(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, take_names, Steps(tmp_path))


def take_names(rank: int, steps: Steps) -> None:
    if rank == 1:
        services.register("score", double)
        services.pair("weights", 1)
    steps.meet("registered", rank, 2)
    if rank == 0:
        for offer, why in (
            (
                lambda: services.register("score", double, idempotent=True),
                r"'score' is taken.*'worker1' \(rank 1\), with idempotent=False",
            ),
            (lambda: services.register("score", later), r"without rpc\.functions\.async_execution"),
            (lambda: services.register_all({"new": double, "weights": double}), r"'weights' is taken"),
            (lambda: services.register("weights", double), r"a value of worker 'worker1' \(rank 1\)"),
            (lambda: services.pair("weights", 2), "choose another name"),
            (lambda: services.pair("score", 2), "a service of worker 'worker1'"),
        ):
            with pytest.raises(NameTaken, match=why):
                offer()
        assert services.statistics() == ()
        assert services.members()[0].services == ()
        services.register("mine", double)
        with pytest.raises(NameTaken, match=r"this worker, 'worker0', offers it already; call services.unregister"):
            services.register("mine", double)
        assert services.call("mine", 2) == 4
        for wrong, error in (
            (lambda: services.register("not callable", 3), r"must be callable; got 3 .*services\.pair"),
            (lambda: services.register("", double), "name must be a str that is not empty"),
            (lambda: services.call("mine", timeout=None), "timeout must be a number of seconds, .*; got None"),
            (lambda: services.call_async("mine", timeout="1"), "timeout must be a number of seconds, .*; got '1'"),
            (lambda: services.call_role("worker", double, args="ab"), "args must be a tuple of arguments.*got 'ab'"),
        ):
            with pytest.raises((TypeError, ValueError), match=error):
                wrong()
        assert "not callable" not in offered()
    steps.meet("done", rank, 2)


def test_the_error_for_an_unknown_name_lists_close_ones(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, ask_for_unknown_names, Steps(tmp_path))


def ask_for_unknown_names(rank: int, steps: Steps) -> None:
    if rank == 0:
        with pytest.raises(UnknownName, match="no worker has registered any name"):
            services.call("score")
    steps.meet("first", rank, 2)
    if rank == 1:
        services.register("score", double)
        services.pair("weights", 1)
    steps.meet("registered", rank, 2)
    if rank == 0:
        for ask in (services.call, services.call_async, services.get):
            with pytest.raises(UnknownName, match=r"no living worker offers 'scor'; close to it is 'score'"):
                ask("scor")
        with pytest.raises(UnknownName, match=r"the names that exist are 'score', 'weights'"):
            services.call("xyz")
        with pytest.raises(TypeError, match=r"is a value of worker 'worker1' .*services.get\('weights'\) returns it"):
            services.call("weights")
        with pytest.raises(TypeError, match=r"is a service of worker 'worker1'"):
            services.get("score")
        with pytest.raises(UnknownName, match=r"no living worker has the role 'driver'; the roles are 'worker'"):
            services.call_role("driver", double)
        with pytest.raises(UnknownName, match=r"does not offer 'score'; it offers nothing"):
            services.unregister("score")
    steps.meet("done", rank, 2)


def test_without_rpc_every_function_says_so() -> None:
    for use in (
        lambda: services.register("a", double),
        lambda: services.call("a"),
        services.members,
        lambda: services.watch("a", print),
    ):
        with pytest.raises(NotRunning, match="RPC is not running"):
            use()
    assert services.statistics() == ()


def test_a_role_is_the_name_without_its_number() -> None:
    assert [role_of(name) for name in ("trainer3", "ps", "eval-12", "ps:0", "42")] == [
        "trainer",
        "ps",
        "eval",
        "ps",
        "42",
    ]


# ---------------------------------------------------------------------------------------------------------- failures


def test_only_idempotent_calls_survive_a_replicas_end(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(4, lose_a_replica, Steps(tmp_path), shutdown=False, exit_codes={1: KILLED})


def nap() -> str:
    time.sleep(0.001)
    return own_name()


class begin_call:  # noqa: N801 - used as a function
    """Begin a synchronous call on another thread."""

    def __init__(self, name: str) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(1)
        self._call = self._executor.submit(services.call, name)

    def wait(self) -> Any:
        return self._call.result()


def lose_a_replica(rank: int, steps: Steps) -> None:
    if rank:
        services.register("nap", nap, idempotent=True)
        if rank == 1:
            services.register("once", wait_at_gate)
            services.register("wait", wait_at_gate)
            services.pair("weights", 1)
    steps.meet("registered", rank, 4)
    if rank == 0:
        seen: list[tuple[str, ...]] = []
        services.watch("nap", lambda service: seen.append(service.workers))
        once, waited = services.call_async("once"), begin_call("wait")
        calls = [services.call_async("nap") for _ in range(500)]
        eventually(lambda: rpc.rpc_sync("worker1", at_gate) == 2, "both calls run there")
        rpc.rpc_async("worker1", die)
        # Calls in flight at the death, and calls that begin before the loss is noticed.
        answers = [call.wait() for call in calls] + [services.call("nap") for _ in range(500)]
        assert set(answers[500:]) >= {"worker2", "worker3"}
        with pytest.raises(WorkerLost) as lost:
            once.wait()
        assert (lost.value.name, lost.value.rank) == ("worker1", 1)
        with pytest.raises(
            ReplicasLost, match=r"'worker1' \(rank 1\) was lost while it was called by 'wait'.*idempotent"
        ):
            waited.wait()
        eventually(lambda: "once" not in offered(), "the names of the dead are gone")
        assert {"weights", "once"}.isdisjoint(offered())
        with pytest.raises(UnknownName):
            services.call("once")
        eventually(lambda: seen[-1] == ("worker2", "worker3"), "the watch has told")
        assert [member.name for member in services.members()] == ["worker0", "worker2", "worker3"]
        # The dead worker's names are free.
        services.pair("weights", 2)
        assert services.get("weights").to_here() == 2
        steps.done("over")
    steps.wait_for("over")
    rpc.shutdown(graceful=False)


def test_without_a_timeout_a_wait_lasts_until_a_worker_decides(run_on_both: RunWorkers) -> None:
    run_on_both(1, wait_for_a_decision)


def wait_for_a_decision(rank: int) -> None:
    services.register("score", double)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Directory, "since", lambda directory, at: None)
        rpc._set_rpc_timeout(0.3)
        with pytest.raises(RuntimeError, match=r"has asked for the names of the job for 0\.3 s, and no worker decides"):
            services.wait_for("score")
        with pytest.raises(RuntimeError, match=r"for 0\.1 s, and no worker decides"):
            services.wait_for("score", timeout=0.1)
        timer = threading.Timer(1.0, patch.undo)
        timer.start()
        assert services.wait_for("score", timeout=0).workers == ("worker0",)
        timer.join()


def test_a_call_fails_when_all_replicas_are_lost(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, lose_all_replicas, Steps(tmp_path), shutdown=False, exit_codes={1: KILLED})


def lose_all_replicas(rank: int, steps: Steps) -> None:
    if rank:
        services.register("wait", wait_at_gate, idempotent=True)
    steps.meet("registered", rank, 2)
    if rank == 0:
        call = services.call_async("wait")
        rpc.rpc_async("worker1", die)
        with pytest.raises(ReplicasLost, match=r"no replica of 'wait' is left: 'worker1' \(rank 1\) was called"):
            call.wait()
        rpc.shutdown(graceful=False)
    else:
        steps.wait_for("never")


def test_names_stay_unique_when_the_decider_dies(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    held = run_on_ucx(4, contend_for_names, Steps(tmp_path), shutdown=False, exit_codes={0: KILLED})
    for name in range(CONTENDED):
        owners = [rank for rank in range(1, 4) if name in held[rank]]
        assert len(owners) == 1, (name, owners)


CONTENDED = 120


def contend_for_names(rank: int, steps: Steps) -> list[int]:
    steps.meet("there", rank, 4)
    if rank == 0:
        # The decider dies while it decides.
        steps.wait_for("begun 1", "begun 2", "begun 3")
        die()
    mine = []
    for name in range(CONTENDED):
        with contextlib.suppress(NameTaken):
            services.pair(f"name {name}", rank)
            mine.append(name)
        if name == CONTENDED // 4:
            steps.done(f"begun {rank}")
    for name in mine:
        assert services.get(f"name {name}").to_here() == rank
    steps.done(f"over {rank}")
    steps.wait_for("over 1", "over 2", "over 3")
    assert len([service for service in services.names() if service.name.startswith("name ")]) == CONTENDED
    # This worker sees itself as the owner of its names.
    assert all(f"worker{rank}" == service.workers[0] for service in services.names() if int(service.name[5:]) in mine)
    steps.done(f"looked {rank}")
    steps.wait_for("looked 1", "looked 2", "looked 3")
    rpc.shutdown(graceful=False)
    return mine


# --------------------------------------------------------------------------------------------------- joins and leaves


def join(rank: int, **overrides: object) -> None:
    init_rpc(rank, world_size=None, **overrides)


def test_joining_workers_know_the_names_of_the_living(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    # The workers meet through a file, so that rank 0 may leave first.
    url = (tmp_path / "store").as_uri()
    run_on_ucx(4, come_and_go, Steps(tmp_path), url, init=False)


def come_and_go(rank: int, steps: Steps, url: str) -> None:
    from tests.support.workers import backend_options

    if rank:
        steps.wait_for(f"joined {rank - 1}")
    join(rank, rpc_backend_options=backend_options(init_method=url))
    for earlier in range(rank):
        assert services.call(f"name {earlier}") == f"worker{earlier}"
    services.register(f"name {rank}", own_name)
    services.register("replica", own_name, idempotent=True)
    steps.done(f"joined {rank}")
    steps.wait_for("joined 3")
    for other in range(4):
        assert services.call(f"name {other}") == f"worker{other}"
    steps.meet("called", rank, 4)
    # The decider leaves, and then the next decider leaves.
    if rank:
        steps.wait_for(f"left {rank - 1}")
        eventually(lambda: f"name {rank - 1}" not in offered(), "the names of who has left are gone")
        assert [member.rank for member in services.members()] == list(range(rank, 4))
        services.pair(f"value of {rank}", rank)
        assert services.call("replica") in {f"worker{later}" for later in range(rank, 4)}
    rpc.shutdown()
    steps.done(f"left {rank}")


def test_restarted_decider_has_none_of_its_former_names(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    run_on_ucx(4, restart_the_decider, Steps(tmp_path), url, init=False, exit_codes={0: KILLED})


def restart_the_decider(rank: int, steps: Steps, url: str) -> None:
    from tests.support.workers import backend_options

    def enter(as_rank: int, name: str) -> None:
        init_rpc(as_rank, name=name, world_size=None, rpc_backend_options=backend_options(init_method=url))

    if rank == 3:
        # The second life of worker0 has the same name and rank.
        steps.wait_for("dead")
        enter(0, "worker0")
        assert "of rank 0" not in offered()
        services.register("of its second life", own_name)
        with pytest.raises(NameTaken, match="'worker1'"):
            services.pair("value of 1", 0)
        steps.done("again")
    else:
        if rank:
            steps.wait_for(f"joined {rank - 1}")
        enter(rank, f"worker{rank}")
        services.register(f"of rank {rank}", own_name)
        services.pair(f"value of {rank}", rank)
        steps.done(f"joined {rank}")
        steps.wait_for("joined 2")
        if rank == 0:
            assert services.call("of rank 2") == "worker2"
            die()
        eventually(lambda: "of rank 0" not in offered(), "the names of the dead are gone")
        steps.done(f"purged {rank}")
        steps.wait_for("purged 1", "purged 2")
        if rank == 1:
            steps.done("dead")
        steps.wait_for("again")
        assert services.call("of its second life") == "worker0"
        assert services.call("of rank 1") == "worker1"
        with pytest.raises(NameTaken, match=f"'worker{3 - rank}'"):
            services.pair(f"value of {3 - rank}", rank)
    steps.done(f"over {rank}")
    steps.wait_for("over 1", "over 2", "over 3")
    rpc.shutdown()


# --------------------------------------------------------------------------------------------------------- the package


def test_importing_the_package_does_not_import_the_libraries() -> None:
    code = (
        "import sys, torch_ucx_rpc; before = set(sys.modules);"
        "assert not [m for m in before if m.startswith(('torch_ucx_rpc.services', 'torch_ucx_rpc.reduction'))];"
        "from torch_ucx_rpc import services;"
        "assert not [m for m in sys.modules if m.startswith('torch_ucx_rpc.reduction')];"
        "from torch_ucx_rpc import reduction; services.call, reduction.serve"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
