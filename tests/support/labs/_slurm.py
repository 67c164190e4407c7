"""A Slurm cluster on virtual hosts: `SlurmCluster`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._virtual_hosts import VirtualHost, VirtualHosts

_CONFIGURATION = """
ClusterName=lab
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
# No cgroups, no systemd, no accounting: nothing of the machine is touched.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
# For the second part of a heterogeneous job, which this scheduler alone starts.
SchedulerParameters=bf_interval=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MailProg=/bin/true
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=2
InactiveLimit=0
PropagateResourceLimits=NONE
NodeName={names} CPUs=4 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""

# The limit from the start of the first daemon until the nodes take jobs; usually one or two seconds.
_START_S = 60.0


class SlurmCluster:
    """Slurm with the virtual hosts as nodes, each with room for 4 tasks, until ``close()`` or the end of a ``with``.

    The controller and the commands run on the hosts' head, with the files of this machine.
    """

    def __init__(self, hosts: VirtualHosts) -> None:
        self.head: VirtualHost = hosts.head
        self._names = [host.name for host in hosts]
        with contextlib.ExitStack() as begun:
            self.directory = Path(begun.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
            configuration = self.directory / "slurm.conf"
            configuration.write_text(_CONFIGURATION.format(directory=self.directory, names=",".join(self._names)))
            self.environment = {**os.environ, "SLURM_CONF": str(configuration)}
            (self.directory / "state").mkdir()
            # Daemons end in reverse order: the controller must not miss its nodes, and needs munge until its end.
            self._start(begun, self.head, ["munged", *self._munge_arguments()])
            self._await(lambda: (self.directory / "munge.socket").exists(), "munged")
            self._start(begun, self.head, ["slurmctld", "-D", "-i", "-c"])
            for host in hosts:
                self._start(begun, host, ["slurmd", "-D", "-N", host.name])
            self._await(self._are_all_idle, "the nodes")
            self._resources = begun.pop_all()

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End Slurm with all its jobs."""
        self._resources.close()

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run srun, sbatch or another command on the head, with ``env`` added to this process's environment."""
        env = {**self.environment, **(env or {})}
        return self.head.run(command, env=env, capture_output=True, text=True, timeout=timeout, **options)

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        return self.head.popen(command, env={**self.environment, **(env or {})}, text=True, **options)

    def _munge_arguments(self) -> list[str]:
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"key-file": key, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        files["seed-file"] = "munged.seed"
        return ["--foreground", "--force"] + [f"--{name}={self.directory / file}" for name, file in files.items()]

    def _start(self, begun: contextlib.ExitStack, host: VirtualHost, command: list[str]) -> None:
        daemon = host.popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        begun.callback(daemon.wait)
        begun.callback(daemon.kill)

    def _are_all_idle(self) -> bool:
        states = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"]).stdout.split("\n")
        return {f"{name} idle" for name in self._names} <= set(states)

    def _await(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():
            if time.monotonic() > deadline:
                logs = "".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in self.directory.glob("*.log"))
                raise RuntimeError(f"Slurm: {what} did not come up\n{logs}")
            time.sleep(0.02)
