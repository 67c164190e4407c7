"""Servers that wait in a graceful shutdown serve on while others die: ``python -m tests.soak.serving --minutes 1``.

Jobs of a fixed number of workers run one after the other. Servers only call ``rpc.shutdown()``, and drivers call all
workers. A random part of the servers is killed at random moments. Findings are: a call that fails although its callee
lives, a wrong answer, a shutdown that does not name exactly the dead workers, and a shutdown that ends more than a
second after the last worker has called it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.workers import Stalls, Transport
from torch_ucx_rpc.errors import BarrierFailed, MessageNotSent, WorkerLost

_WORKERS = 6
_KILLED = -signal.SIGKILL
# The time between the end of a process and the news of it.
_NEWS_S = 1.0


class Plan(NamedTuple):
    """A job. Times are seconds after all have joined."""

    seed: int
    drivers: dict[int, float]  # by rank: when it has made its calls
    deaths: dict[int, float]  # by rank

    @classmethod
    def of(cls, seed: int) -> Plan:
        random_ = random.Random(seed)
        ranks = random_.sample(range(_WORKERS), _WORKERS)
        drivers = {rank: random_.uniform(1, 3) for rank in ranks[:2]}
        return cls(seed, drivers, {rank: random_.uniform(0, 3) for rank in ranks[2 : 2 + random_.randint(1, 3)]})


def live(rank: int, plan: Plan) -> tuple[float, float, int]:
    began = time.monotonic()
    if (death := plan.deaths.get(rank)) is not None:
        threading.Timer(death, os.kill, (os.getpid(), signal.SIGKILL)).start()
    calls = drive(rank, plan, began) if rank in plan.drivers else 0
    with Stalls() as stalls:
        arrived = time.monotonic()
        named = shut_down()
        dead = {other for other, death in plan.deaths.items() if death < time.monotonic() - began - _NEWS_S}
        assert dead <= named <= set(plan.deaths), f"the shutdown names {named}, and {dead} are dead"
    return arrived, time.monotonic() - stalls.seconds(), calls


def shut_down() -> set[int]:
    try:
        rpc.shutdown()
    except BarrierFailed as error:
        return named_in(error)
    return set()


def drive(rank: int, plan: Plan, began: float) -> int:
    random_ = random.Random(f"{plan.seed} {rank}")
    calls = 0
    while (now := time.monotonic() - began) < plan.drivers[rank]:
        callee, third = random_.sample(range(_WORKERS), 2)
        tensor = torch.full((random_.choice((1, 1000, 300_000)),), float(calls))
        target, *asked = (double, tensor) if random_.random() < 0.5 else (ask, f"worker{third}", tensor)
        try:
            answer = rpc.rpc_sync(f"worker{callee}", target, tuple(asked))
        except (WorkerLost, MessageNotSent) as error:
            check_failure(error, plan, began)
        else:
            assert torch.equal(answer, 2 * tensor), "a wrong answer"
            assert now < plan.deaths.get(callee, now + 1) + _NEWS_S, "a dead worker has answered"
        calls += 1
    return calls


def check_failure(error: Exception, plan: Plan, began: float) -> None:
    """A connection to a worker that is about to die may fail before the death is known."""
    named = named_in(error)
    assert named, error
    for lost in named:
        assert lost in plan.deaths, f"a call to a worker that lives has failed: {error}"
        assert plan.deaths[lost] < time.monotonic() - began + _NEWS_S, f"lost before its death: {error}"


def named_in(error: Exception) -> set[int]:
    return {int(rank) for rank in re.findall(r"(?:lost|could not send to) worker 'worker(\d+)'", str(error))}


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def ask(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(name, double, (tensor,))


def run(seed: int) -> tuple[int, int]:
    """Run one job. Return the numbers of its calls and deaths. Raise AssertionError for a finding."""
    plan = Plan.of(seed)
    transport = random.Random(seed).choice(list(Transport))
    codes = dict.fromkeys(plan.deaths, _KILLED)
    ends = workers.run_workers(
        _WORKERS, live, plan, transport=transport, exit_codes=codes, shutdown=False, silent=False, timeout=60
    )
    lived = [end for end in ends if end is not None]
    last = max(arrived for arrived, _, _ in lived)
    late = max(ended for _, ended, _ in lived) - last
    assert late < 1, f"seed {seed}: the shutdown has outlasted the last arrival by {late:.1f} s"
    return sum(calls for *_, calls in lived), len(plan.deaths)


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak.serving", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the soak (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the first job (default: any)")
    arguments = parser.parse_args()
    print(f"soak.serving: {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    end = time.monotonic() + 60 * arguments.minutes
    jobs = calls = deaths = 0
    while time.monotonic() < end:
        try:
            made, died = run(arguments.seed + jobs)
        except AssertionError as error:
            print(f"seed {arguments.seed + jobs}: {error}")
            return 1
        jobs, calls, deaths = jobs + 1, calls + made, deaths + died
    print(f"soak.serving: {jobs} jobs, {calls} calls, {deaths} deaths, nothing found")
    return 0


if __name__ == "__main__":
    # Workers import their functions by the module's name.
    from tests.soak.serving import main as main_of_module

    sys.exit(main_of_module())
