"""One worker decides on names. It dies, others hang, changes are interrupted, and networks are cut."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.rpc as rpc

import torch_ucx_rpc
from tests.support import workers
from tests.support.labs import Fate, VirtualHosts
from tests.support.workers import Steps, backend_options, eventually, init_rpc
from torch_ucx_rpc import services
from torch_ucx_rpc.services import NameTaken, UnknownName, _directory
from torch_ucx_rpc.services._directory import LIMIT_S, directory
from torch_ucx_rpc.services._table import Offer, Owner, conflicts

from ._jobs import KILLED, PATIENCE_S, die

RunWorkers = Callable[..., list]


def own_name() -> str:
    return rpc.get_worker_info().name


def offered() -> set[str]:
    return {service.name for service in services.names()}


def pair_if_free(name: str, value: int) -> bool:
    try:
        services.pair(name, value)
    except NameTaken:
        return False
    return True


def tell_pid(steps: Steps, rank: int) -> None:
    (steps.directory / f"pid {rank}").write_text(str(os.getpid()))


def pid_of(steps: Steps, rank: int) -> int:
    return int((steps.directory / f"pid {rank}").read_text())


# ---- Workers that hang, and deciders that die ------------------------------------------------------------------------


def test_a_worker_that_died_before_the_first_name_stops_none(run_on_ucx: RunWorkers) -> None:
    run_on_ucx(2, register_after_a_death, shutdown=False, exit_codes={0: KILLED})


def register_after_a_death(rank: int) -> None:
    if rank == 0:
        die()
    eventually(lambda: any(peer.state == "failed" for peer in torch_ucx_rpc.statistics().peers), "it is lost")
    services.pair("weights", 1)
    assert offered() == {"weights"}
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("group", ["fixed", "dynamic"])
def test_a_hung_worker_and_a_dead_decider_stop_no_names(run_on_ucx: RunWorkers, tmp_path: Path, group: str) -> None:
    run_on_ucx(4, go_on_without_two, Steps(tmp_path), group, init=False, shutdown=False, exit_codes={0: KILLED})


def test_hung_and_dead_workers_stop_no_names_on_tensorpipe(run_on_tensorpipe: RunWorkers, tmp_path: Path) -> None:
    job = {"init": False, "shutdown": False, "exit_codes": {0: KILLED}}
    run_on_tensorpipe(4, go_on_without_two, Steps(tmp_path), "fixed", **job)


def go_on_without_two(rank: int, steps: Steps, group: str) -> None:
    if group == "fixed":
        init_rpc(rank)
    else:
        if rank:
            steps.wait_for(f"there {rank - 1}")
        url = (steps.directory / "store").as_uri()
        init_rpc(rank, world_size=None, rpc_backend_options=backend_options(init_method=url))
    services.register(f"of {rank}", own_name)
    tell_pid(steps, rank)
    steps.meet("there", rank, 4)
    assert offered() == {f"of {other}" for other in range(4)}
    steps.meet("known", rank, 4)
    if rank == 0:
        steps.wait_for("stopped")
        die()
    if rank == 1:
        workers.stop(pid_of(steps, 3))
        # A worker that hangs delays no change of names.
        began = time.monotonic()
        services.register("while it hangs", own_name)
        with pytest.raises(UnknownName):
            services.call("unknown")
        assert time.monotonic() - began < LIMIT_S
        steps.done("stopped")
        eventually(lambda: "of 0" not in offered(), "the decider is dead")
        services.register("after", own_name)
        with pytest.raises(UnknownName, match="no living worker offers 'unknown'"):
            services.call("unknown")
        # A silent worker keeps its names.
        assert offered() == {"of 1", "of 2", "of 3", "while it hangs", "after"}
        with pytest.raises(NameTaken, match="'worker3'"):
            services.pair("of 3", 1)
        os.kill(pid_of(steps, 3), signal.SIGCONT)
        assert services.call("of 3", timeout=30) == "worker3"
        steps.done("over 1")
    if rank == 3:
        eventually(lambda: steps.is_done("over 1"), "", timeout=60)
        services.register("back", own_name)
        steps.done("over 3")
    steps.wait_for("over 1", "over 3", timeout=90)
    assert services.call("back") == "worker3"
    assert services.call("after") == "worker1"
    steps.done(f"called {rank}")
    steps.wait_for("called 1", "called 2", "called 3")
    rpc.shutdown(graceful=False)


def test_a_decider_that_hangs_is_replaced_and_comes_back(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, stop_the_decider, Steps(tmp_path))


def stop_the_decider(rank: int, steps: Steps) -> None:
    services.register("replica", own_name, idempotent=True)
    services.pair(f"of {rank}", rank)
    tell_pid(steps, rank)
    steps.meet("there", rank, 3)
    if rank == 1:
        workers.stop(pid_of(steps, 0))
        services.register("while it hangs", own_name)
        # The silent worker is not a member, so calls go to the others.
        assert {services.call("replica", timeout=5) for _ in range(6)} == {"worker1", "worker2"}
        os.kill(pid_of(steps, 0), signal.SIGCONT)
        eventually(lambda: services.call("replica") == "worker0", "it is called again")
        steps.done("continued")
    steps.wait_for("continued", timeout=60)
    services.pair(f"later of {rank}", rank)
    assert services.get("of 0").to_here() == 0
    assert services.call("while it hangs") == "worker1"
    steps.meet("over", rank, 3)


def test_a_worker_gives_up_a_name_that_was_lost(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, lose_a_name, Steps(tmp_path))


class Remember(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def lose_a_name(rank: int, steps: Steps) -> None:
    log = Remember()
    logging.getLogger("torch_ucx_rpc").addHandler(log)
    if rank == 2:
        services.pair("seat", 2)
        services.register("kept", own_name)
        tell_pid(steps, rank)
    steps.meet("paired", rank, 3)
    if rank == 0:
        workers.stop(pid_of(steps, 2))
        known = directory()
        # Act as if this decider had taken over without knowing of the name.
        with known.lock:
            known.owners["worker2"] = known.owners["worker2"].without(["seat"])
        services.pair("seat", 0)
        eventually(lambda: known._epoch.number > 1, "worker2 is out")
        os.kill(pid_of(steps, 2), signal.SIGCONT)
        steps.done("continued")
    steps.wait_for("continued")
    if rank == 2:
        eventually(lambda: "seat" not in directory().served, "it is given up")
        eventually(lambda: any("another worker has got the name 'seat'" in text for text in log.texts), "it is logged")
    steps.meet("given up", rank, 3)
    assert services.get("seat").to_here() == 0
    assert services.call("kept") == "worker2"
    steps.meet("over", rank, 3)


@pytest.mark.parametrize("moment", ["_on", "_from_decider"])
def test_the_next_decider_knows_a_grant_or_the_grant_is_void(
    run_on_ucx: RunWorkers, tmp_path: Path, moment: str
) -> None:
    run_on_ucx(3, change_the_decider, Steps(tmp_path), moment, shutdown=False, exit_codes={0: KILLED})


def change_the_decider(rank: int, steps: Steps, moment: str) -> None:
    assert offered() == set()
    steps.meet("known", rank, 3)
    if rank == 2:
        done = getattr(_directory.Directory, moment)
        got: list[bool] = []

        def overtaken(*arguments: object) -> object:
            granted = done(*arguments)
            # The grant has arrived, and its decider dies. The next decider wants the name itself.
            setattr(_directory.Directory, moment, done)
            rpc.rpc_async("worker0", die)
            eventually(lambda: len(services.members()) == 2, "worker0 is lost")
            got.append(rpc.rpc_sync("worker1", pair_if_free, args=("seat", 1)))
            return granted

        setattr(_directory.Directory, moment, overtaken)
        got.append(pair_if_free("seat", 2))
        assert sorted(got) == [False, True]
        owner = 1 if got[0] else 2
        for asked in (1, 2):
            assert rpc.rpc_sync(f"worker{asked}", owners_of_the_seat) == (f"worker{owner}",)
    if rank:
        steps.done(f"over {rank}")
        steps.wait_for("over 1", "over 2")
    else:
        steps.wait_for("never")
    rpc.shutdown(graceful=False)


def owners_of_the_seat() -> tuple[str, ...]:
    return {service.name: service.workers for service in services.names()}["seat"]


# ---- Several workers want one name -----------------------------------------------------------------------------------


def test_only_one_of_three_workers_gets_a_name(run_on_both: RunWorkers, tmp_path: Path) -> None:
    got = run_on_both(3, want_the_same, Steps(tmp_path))
    assert [sum(ranks) for ranks in zip(*got, strict=True)] == [1] * 20


def want_the_same(rank: int, steps: Steps) -> list[bool]:
    got = []
    for turn in range(20):
        steps.meet(f"turn {turn}", rank, 3)
        got.append(pair_if_free(f"seat {turn}", rank))
        services.register(f"replica {turn}", own_name)
    steps.meet("over", rank, 3)
    assert services.wait_for("replica 19", replicas=3).workers == ("worker0", "worker1", "worker2")
    steps.meet("waited", rank, 3)
    return got


# ---- Shutdown --------------------------------------------------------------------------------------------------------


def test_workers_that_wait_in_shutdown_serve_and_register(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, serve_in_shutdown, Steps(tmp_path), shutdown=False)


def register_another() -> None:
    services.register("another", own_name)


def serve_in_shutdown(rank: int, steps: Steps) -> None:
    if rank:
        services.register("name", own_name, idempotent=True)
    else:
        services.wait_for("name", replicas=2)
        time.sleep(LIMIT_S)
        assert {services.call("name") for _ in range(4)} == {"worker1", "worker2"}
        rpc.rpc_sync("worker2", register_another)
        assert services.call("another") == "worker2"
        services.pair("mine", 0)
    rpc.shutdown()


def test_a_replica_that_waits_in_shutdown_outlives_a_death(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    job = {"shutdown": False, "exit_codes": {1: KILLED}}
    run_on_ucx(4, serve_in_shutdown_while_one_dies, Steps(tmp_path), **job)


def serve_in_shutdown_while_one_dies(rank: int, steps: Steps) -> None:
    if rank:
        services.register("name", own_name, idempotent=True)
    else:
        services.wait_for("name", replicas=3)
        for number in range(300):
            if number == 100:
                rpc.rpc_async("worker1", die)
            assert services.call("name").startswith("worker")
        services.register("later", own_name)
        assert {services.call("name") for _ in range(4)} == {"worker2", "worker3"}
    with pytest.raises(RuntimeError, match="lost worker 'worker1'"):
        rpc.shutdown()


# ---- Deaths on TensorPipe, where no agent reports --------------------------------------------------------------------


def test_names_of_dead_workers_are_removed_on_tensorpipe(run_on_tensorpipe: RunWorkers, tmp_path: Path) -> None:
    run_on_tensorpipe(3, lose_a_worker, Steps(tmp_path), shutdown=False, exit_codes={1: KILLED})


def lose_a_worker(rank: int, steps: Steps) -> None:
    services.register("name", own_name, idempotent=True)
    services.pair(f"of {rank}", rank)
    steps.meet("registered", rank, 3)
    if rank == 1:
        die()
    # No call to the dead worker shows the loss.
    gone = services.watch("name", lambda service: "worker1" in service.workers or steps.done(f"told {rank}"))
    steps.wait_for("told 0", "told 2", timeout=60)
    gone()
    assert offered() == {"name", "of 0", "of 2"}
    assert services.wait_for("name").workers == ("worker0", "worker2")
    steps.done(f"over {rank}")
    steps.wait_for("over 0", "over 2")
    rpc.shutdown(graceful=False)


# ---- A cut of the network --------------------------------------------------------------------------------------------


def test_the_smaller_side_of_a_cut_decides_nothing(hosts: VirtualHosts, fate: Fate, tmp_path: Path) -> None:
    arguments = {"shutdown": False, "silent": False, "timeout": PATIENCE_S}
    workers.run_workers(3, be_cut_off, Steps(tmp_path), fate, hosts=hosts, **arguments)


def be_cut_off(rank: int, steps: Steps, fate: Fate) -> None:
    services.register(f"of {rank}", own_name)
    services.register("replica", own_name)
    steps.meet("there", rank, 3)
    assert services.wait_for("replica", replicas=3)
    steps.meet("known", rank, 3)
    if rank == 0:
        fate.of("c", "cut")
        steps.done("cut")
    steps.wait_for("cut")
    if rank == 2:
        _directory.get_rpc_timeout = lambda: 4 * LIMIT_S  # the limit of the decision
        with pytest.raises(RuntimeError, match="no worker decides: worker 'worker2' is cut off from"):
            services.pair("seat", 2)
        assert services.call("of 2") == "worker2"
        steps.done("refused")
    elif rank == 1:
        services.pair("seat", 1)
    steps.wait_for("refused", timeout=60)
    if rank == 0:
        assert services.get("seat").to_here() == 1
        fate.of("c", "heal")
        steps.done("healed")
    steps.wait_for("healed")
    services.pair(f"after of {rank}", rank)
    assert services.get("seat").to_here() == 1
    steps.meet("over", rank, 3)
    rpc.shutdown(graceful=False)


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_all_know_the_outcome_of_an_interrupted_change(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, interrupt_changes, Steps(tmp_path))


def interrupt_changes(rank: int, steps: Steps) -> None:
    assert offered() == set()
    steps.meet("before", rank, 3)
    if rank == 1:
        for moment in ("_from_decider", "_on"):
            interrupt(services.pair, moment, f"weights {moment}", 1)
            # A worker that was interrupted before it read its grant does not have the name.
            assert (f"weights {moment}" in directory().served) == (moment == "_from_decider")
            services.pair(f"bias {moment}", 1)
            interrupt(services.unregister, moment, f"bias {moment}")
            assert (f"bias {moment}" in directory().served) == (moment == "_on")
        with contextlib.suppress(UnknownName):
            services.unregister("weights _from_decider")
        steps.done("interrupted")
    steps.wait_for("interrupted")
    if rank == 2:
        services.pair("weights _on", 2)
        assert services.get("weights _on").to_here() == 2
    steps.meet("over", rank, 3)


def interrupt(change: Callable[..., None], moment: str, *arguments: object) -> None:
    done = getattr(_directory.Directory, moment)

    def interrupted(*arguments: object) -> None:
        setattr(_directory.Directory, moment, done)
        done(*arguments)
        raise KeyboardInterrupt

    setattr(_directory.Directory, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        change(*arguments)
    served = set(directory().served)
    eventually(lambda: all(rpc.rpc_sync(other, offered) == served for other in ("worker0", "worker2")), "all know it")


# ---- The rules -------------------------------------------------------------------------------------------------------


def test_replicas_are_alike_and_values_are_alone() -> None:
    service, value, again = Offer(False), Offer(True), Offer(False, idempotent=True)
    there = {"w1": Owner("w1", 1, 7, 1, {"a": service, "b": value, "c": again})}
    claim = Owner("w2", 2, 8, 1, {"a": service, "b": value, "c": service, "d": value})
    assert sorted(conflicts(there, claim)) == ["b", "c"]
    assert conflicts(there, claim._replace(worker="w1")) == {}
    assert sorted(claim.without(conflicts(there, claim)).offers) == ["a", "d"]
