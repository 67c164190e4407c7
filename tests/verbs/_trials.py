"""The trials of the workers, and their required outcomes: `TRIALS`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from ._machines import ABORTED, KILLED, Ended, Job, Machine, Machines
from ._workers import Stuck, Workers, expect, expect_within, faults

# The limit for calls to a killed worker: docs/failure_model.md promises 2 s, and these machines are slow.
_TOLD_S = 2.0
# heartbeat_limit has its default. A silent worker counts as lost after 1.05 times the limit plus 0.3 s.
_LIMIT_S = 10.0
_SILENCE_S = (_LIMIT_S, 1.05 * _LIMIT_S + 0.3 + 2)
# The limit of a shutdown that knows of the lost worker. Without that knowledge it took 30 s.
_LEAVE_S = 15.0

# The second worker is in its shutdown all the time, and its time counts from before the misfortune. It runs the handler
# of the open call for a minute, which delays nothing.
_OTHER_LEAVES_S = 30.0

_BELOW_S = 4.0
_BEYOND_S = 16.0
# Beyond heartbeat_limit, and below reconnect_limit's default of 60 s.
_ENDURED_S = 30.0
_LAUNCHER_S = 600.0

# The machines have this queue from the start (guest/init). Replacing it by another kind would refuse a packet. That
# breaks a connection of Soft-RoCE at once.
_LOSE_ALL = "tc qdisc change dev eth0 root netem limit 100000 loss 100%"
_LOSE_NONE = "tc qdisc change dev eth0 root netem limit 100000 loss 0%"
_RC = "rc_verbs/rxe0:1"
_UD = "ud_verbs/rxe0:1"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial. `run` gets running machines, and returns its measurements or raises `Failed`."""

    name: str
    run: Callable[[Machines], str]

    @property
    def about(self) -> str:
        return (self.run.__doc__ or "").split("\n")[0]


TRIALS: list[Trial] = []


def _trial(run: Callable[[Machines], str]) -> Callable[[Machines], str]:
    TRIALS.append(Trial(run.__name__.lstrip("_"), run))
    return run


# The programs of the workers.


@_trial
def calls(machines: Machines) -> str:
    """Calls, 64 MiB exact, RRefs, autograd, nested calls, 100 MiB at once, over the lanes that UCX chooses."""
    return _calls(machines, _RC)


@_trial
def calls_with_a_secret(machines: Machines) -> str:
    """The same traffic with TORCH_UCX_RPC_SECRET, which authenticates every message."""
    return _calls(machines, _RC, TORCH_UCX_RPC_SECRET="a secret of two machines", LARGE_MIB="16", FLOOD_MIB="20")


@_trial
def calls_without_tcp(machines: Machines) -> str:
    """The same traffic over reliable connections only, by UCX_TLS. UCX does not warn of this package's defaults."""
    return _calls(machines, _RC, UCX_TLS="rc,self", LARGE_MIB="16", FLOOD_MIB="20")


@_trial
def calls_by_datagrams(machines: Machines) -> str:
    """The same traffic over unreliable datagrams only."""
    return _calls(machines, _UD, UCX_TLS="ud_verbs,self", LARGE_MIB="16", FLOOD_MIB="20")


@_trial
def lives(machines: Machines) -> str:
    """Ten lives of two processes: each life makes connections, calls and leaves."""
    told, other = Workers(machines, "lives.py").end()
    expect(told["lives"] == other["lives"] == 10, f"{told['lives']} and {other['lives']} lives")
    return f"the last: init_rpc {told['init_s']:.1f} s, shutdown {told['shutdown_s']:.1f} s"


@_trial
def launcher(machines: Machines) -> str:
    """`run --nnodes 2` starts a worker on each machine, and `check` finds no problem between them."""
    command = (
        "cd /tmp && python3 -m torch_ucx_rpc run -n 1 --nnodes 2 --node-rank {rank} --rdzv n1:29600 "
        "-m torch_ucx_rpc check --timeout 120 2>&1"
    )
    begin = time.monotonic()
    jobs = [machine.begin(command.format(rank=rank)) for rank, machine in enumerate((machines.first, machines.second))]
    for job in jobs:
        done = _wait(job, _LAUNCHER_S)
        expect(done.status == 0, f"status {done.status}\n{done.output}")
        expect(not faults(done.output), done.output)
    report = jobs[0].output
    expect(_RC in report, f"no lane {_RC}:\n{report}")
    expect("No problems found" in report, report)
    return f"{time.monotonic() - begin:.0f} s, imports of torch included"


@_trial
def no_auxiliary_transport(machines: Machines) -> str:
    """UCX_TLS=rc_verbs,self cannot connect, and the error of the first call says which name can."""
    # UCX 1.18 counts an operation for each connection that it refuses to make, but waits for none of them.
    told, _ = Workers(machines, "alone.py", UCX_TLS="rc_verbs,self").end(known="pending operations were not flushed")
    expect("say rc instead of rc_verbs" in told.get("error", ""), f"the error: {told.get('error')}")
    expect_within(_TOLD_S, told["told_after_s"], "told")
    return f"told after {told['told_after_s']:.2f} s"


# Misfortunes shorter than the limit.


@_trial
def paused_below_the_limit(machines: Machines) -> str:
    """A machine that is paused for 4 s loses no call."""
    return _unharmed(machines, lambda _: _pause(machines.second, _BELOW_S))


@_trial
def cut_below_the_limit(machines: Machines) -> str:
    """A cut of 4 s loses no call."""
    return _unharmed(machines, lambda _: _cut(machines, _BELOW_S))


@_trial
def cut_that_ends_in_time(machines: Machines) -> str:
    """A cut of 30 s loses no call at the default limits."""
    return _unharmed(machines, lambda _: _cut(machines, _ENDURED_S), seconds=_ENDURED_S + 15, RECONNECT_LIMIT="60")


# Misfortunes that end a worker. The workers have no reconnect_limit.


@_trial
def killed(machines: Machines) -> str:
    """After SIGKILL of a worker, calls to it from the other machine fail within 2 s."""
    workers = _watch(machines)
    machines.second.run(f"kill -9 {workers.second_process()}")
    return _lost(workers, (0.0, _TOLD_S), second=(KILLED,))


@_trial
def link_down(machines: Machines) -> str:
    """A link that is down for 4 s: the other machine's worker loses its peer within the limit, and leaves."""
    workers = _watch(machines)
    machines.second.run(f"ip link set eth0 down; sleep {_BELOW_S}; ip link set eth0 up")
    # If Soft-RoCE returns a process's datagrams, UCX itself ends the process.
    aborts = r"ud_verbs\.c:\d+ +Fatal: receive completion.*Work Request Flushed Error"
    return _lost(workers, (0.0, _SILENCE_S[1]), second=(0, ABORTED), known=aborts)


@_trial
def paused_beyond_the_limit(machines: Machines) -> str:
    """A machine that is paused for 16 s is lost after the limit. Its worker leaves when the machine continues."""
    workers = _watch(machines)
    _pause(machines.second, _BEYOND_S)
    return _lost(workers, _SILENCE_S)


@_trial
def cut_beyond_the_limit(machines: Machines) -> str:
    """In a cut of 16 s the workers lose each other after the limit, and both leave."""
    workers = _watch(machines)
    _cut(machines, _BEYOND_S)
    return _lost(workers, _SILENCE_S)


@_trial
def powered_off(machines: Machines) -> str:
    """A machine without power is lost after the limit."""
    workers = _watch(machines)
    machines.second.power_off()
    return _lost(workers, _SILENCE_S, second=(None,))


def _calls(machines: Machines, lane: str, **environment: str) -> str:
    told, _ = Workers(machines, "calls.py", **environment).end()
    expect(lane in told["lanes"], f"no lane {lane}: {told['lanes']}")
    expect(told["losses"] == sorted(told["losses"], reverse=True), f"the losses do not fall: {told['losses']}")
    expect("shutdown_error" not in told, f"shutdown: {told.get('shutdown_error')}")
    return (
        f"init_rpc {told['init_s']:.1f} s, a small call {told['small_call_ms']:.1f} ms, "
        f"{told['large_mib']} MiB there and back {told['large_s']:.1f} s, "
        f"{told['flood_mib']} calls of 1 MiB at once {told['flood_s']:.1f} s, shutdown {told['shutdown_s']:.1f} s"
    )


def _watch(machines: Machines, seconds: float = 60, **environment: str) -> Workers:
    workers = Workers(machines, "watch.py", SECONDS_TO_CALL=str(seconds), **environment)
    workers.await_ready()
    return workers


def _unharmed(
    machines: Machines, misfortune: Callable[[Workers], None], seconds: float = 15, **environment: str
) -> str:
    workers = _watch(machines, seconds, **environment)
    misfortune(workers)
    told, _ = workers.end()
    expect("error" not in told, f"a call failed after {told.get('told_after_s')} s: {told.get('error')}")
    expect(told["open_call"] == "answered", "the open call failed")
    expect("shutdown_error" not in told, f"shutdown: {told.get('shutdown_error')}")
    # Otherwise the misfortune had no effect.
    expect(told["slowest_s"] > _BELOW_S / 2, f"the slowest call took {told['slowest_s']:.2f} s only")
    return f"all {told['calls']} calls were answered, the slowest after {told['slowest_s']:.1f} s"


def _lost(workers: Workers, when: tuple[float, float], second: Sequence[int | None] = (0,), known: str = "") -> str:
    told, other = workers.end(second, known)
    expect("error" in told, f"no call failed; the slowest took {told.get('slowest_s')} s")
    expect("lost worker 'w1'" in told["error"], f"the error is another: {told['error']}")
    text = f"told after {told['told_after_s']:.1f} s, shutdown {told['shutdown_s']:.1f} s"
    first, last = when
    expect(first <= told["told_after_s"], f"told after {told['told_after_s']:.1f} s, before {first:g} s")
    expect_within(last, told["told_after_s"], "told")
    expect(told["open_call"] == "failed" and told["open_call_s"] < 1, f"the open call: {told}")
    expect("lost worker 'w1'" in told.get("shutdown_error", ""), f"shutdown: {told.get('shutdown_error')}")
    expect_within(_LEAVE_S, told["shutdown_s"], f"{text}: shutdown")
    if "shutdown_s" in other:
        text += f", of the other one {other['shutdown_s']:.1f} s"
        expect_within(_OTHER_LEAVES_S, other["shutdown_s"], f"{text}: shutdown of the other one")
    elif ABORTED in second:
        text += "; UCX aborted the other one"
    return text


def _pause(machine: Machine, seconds: float) -> None:
    machine.pause()
    time.sleep(seconds)
    machine.resume()


def _cut(machines: Machines, seconds: float) -> None:
    """Cut both directions; no machine is notified."""
    for command in (_LOSE_ALL, _LOSE_NONE):
        jobs = [machine.begin(command) for machine in (machines.first, machines.second)]
        for job in jobs:
            done = _wait(job, 60)
            expect(done.status == 0, f"{command}: {done.output}")
        if command == _LOSE_ALL:
            time.sleep(seconds)


def _wait(job: Job, timeout: float) -> Ended:
    try:
        return job.wait(timeout)
    except TimeoutError as error:
        raise Stuck(str(error)) from None
