"""One name, one owner: grants that come while another worker begins to decide, changes that are interrupted, cuts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.rpc as rpc

from tests.support.workers import Steps, eventually
from torch_ucx_rpc import services
from torch_ucx_rpc.services import NameContested, NameTaken, _announcing, _directory

from ._jobs import KILLED, die

RunWorkers = Callable[..., list]


def offered() -> set[str]:
    return {service.name for service in services.names()}


# ---- Another decider -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["_ask", "_claim"])
def test_grant_of_a_former_decider_is_known_to_the_next_or_void(
    run_on_ucx: RunWorkers, tmp_path: Path, moment: str
) -> None:
    run_on_ucx(3, change_the_decider, Steps(tmp_path), moment, shutdown=False, exit_codes={0: KILLED})


def pair_if_free(value: int) -> bool:
    """Whether this worker, which decides by now, has got the name."""
    try:
        services.pair("seat", value)
    except NameTaken:
        return False
    return True


def change_the_decider(rank: int, steps: Steps, moment: str) -> None:
    # All know the first decider.
    assert offered() == set()
    steps.meet("known", rank, 3)
    if rank == 2:
        place = _directory if moment == "_ask" else _directory.Directory
        done = getattr(place, moment)
        got: list[bool] = []

        def overtaken(*arguments: object) -> object:
            granted = done(*arguments)
            # The grant is here, and its decider dies: the next one gathers, and wants the name itself.
            setattr(place, moment, done)
            rpc.rpc_async("worker0", die)
            eventually(lambda: len(services.members()) == 2, "worker0 is lost")
            got.append(rpc.rpc_sync("worker1", pair_if_free, args=(1,)))
            return granted

        setattr(place, moment, overtaken)
        got.append(pair_if_free(2))
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


# ---- Workers that have lost each other -------------------------------------------------------------------------------


def test_name_granted_on_both_sides_of_a_cut_is_refused(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, decide_on_both_sides, Steps(tmp_path), shutdown=False)


def decide_on_both_sides(rank: int, steps: Steps) -> None:
    services.register(f"of {rank}", offered)
    steps.meet("registered", rank, 3)
    known = _directory.directory()
    if rank < 2:
        # As when the agent sees the end of a worker. Worker2 sees none.
        other = f"worker{1 - rank}"
        known.drop(other, known.table.owners[other].life)
    steps.meet("cut", rank, 3)
    if rank < 2:
        services.pair("seat", rank)
        services.register("door", offered, unique=True)
        # Each side has its own.
        assert services.get("seat").to_here() == rank
    steps.meet("decided", rank, 3)
    if rank == 2:
        why = (
            r"has several owners.*worker 'worker0' \(rank 0\), worker 'worker1' \(rank 1\)\. They have lost each other"
        )
        for use in (lambda: services.get("seat"), lambda: services.call("door"), lambda: services.call_async("door")):
            with pytest.raises(NameContested, match=why):
                use()
    steps.meet("refused", rank, 3)
    if rank == 1:
        services.unregister("seat")
    steps.meet("given up", rank, 3)
    if rank == 2:
        # No RRef here: nobody waits for its end in what follows.
        assert owners_of_the_seat() == ("worker0",)
        # One decider knows what this worker offers, and it asks the other one, whose rank is lower.
        _directory.get_rpc_timeout = lambda: 0.3  # for the decision; its calls keep their time
        with pytest.raises(
            RuntimeError, match=r"asked worker 'worker0' .*take different workers for the one that decid"
        ):
            services.pair("mine", 2)
        assert "mine" not in offered()
    steps.meet("over", rank, 3)
    rpc.shutdown(graceful=False)


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_all_hear_the_outcome_of_an_interrupted_change(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, interrupt_changes, Steps(tmp_path))


def interrupt_changes(rank: int, steps: Steps) -> None:
    # From now on they hear of changes, and do not ask.
    assert offered() == set()
    steps.meet("before", rank, 3)
    if rank == 1:
        places = {"announce": _announcing.Announcer, "_claim": _directory.Directory, "_ask": _directory}
        for moment, place in places.items():
            interrupt(services.pair, place, moment, f"weights {moment}", 1)
            # It is one or the other: a grant that nobody has read is none.
            assert (f"weights {moment}" in offered()) == (moment != "_ask")
            services.pair(f"bias {moment}", 1)
            interrupt(services.unregister, place, moment, f"bias {moment}")
            assert (f"bias {moment}" in offered()) == (moment == "_ask")
    steps.meet("over", rank, 3)


def interrupt(change: Callable[..., None], place: object, moment: str, *arguments: object) -> None:
    done = getattr(place, moment)

    def interrupted(*arguments: object) -> None:
        setattr(place, moment, done)
        # Nobody has been told yet when the announcement begins.
        if moment != "announce":
            done(*arguments)
        raise KeyboardInterrupt

    setattr(place, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        change(*arguments)
    others = ("worker0", "worker2")
    eventually(lambda: all(rpc.rpc_sync(other, offered) == offered() for other in others), "the others know of it")
    # And hears of later changes as ever.
    services.pair("later", 1)
    assert "later" in rpc.rpc_sync("worker2", offered)
    services.unregister("later")
