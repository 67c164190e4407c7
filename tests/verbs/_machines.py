"""Two machines, each with its own kernel, joined by a cable that carries Soft-RoCE: `Machines`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

PROGRAMS = Path(__file__).resolve().parent / "programs"

_MEMORY_MIB = 2048
_BOOT_S = 300.0
# An emulated machine needs half a minute to import torch, and longer on a busy host.
_IMPORT_S = 600.0
_ORDER_S = 60.0

# A shell's exit codes: 128 plus the number of the signal.
KILLED = 128 + signal.SIGKILL
ABORTED = 128 + signal.SIGABRT


class MachineEnded(Exception):
    """A machine ended by itself: its kernel has crashed, and its console shows the reason."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended. `status` is None if its machine was switched off first."""

    status: int | None
    output: str


class Job:
    """A command on a machine. It communicates through files, so it works while the machine's network is cut."""

    def __init__(self, machine: Machine, base: Path) -> None:
        self._machine = machine
        self._base = base

    @property
    def output(self) -> str:
        file = self._base.with_suffix(".out")
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    @property
    def process(self) -> int:
        """The pid of a program on its machine."""
        return int(self._machine.await_file(self._base.with_suffix(".pid"), _ORDER_S))

    def wait(self, timeout: float) -> Ended:
        """Wait for the end. Raise TimeoutError with the output so far, or `MachineEnded`."""
        status = self._machine.await_file(self._base.with_suffix(".rc"), timeout)
        return Ended(int(status) if status else None, self.output)


class Machine:
    """One of `Machines`.

    A machine keeps changed files in its own memory, so they end with it. Both machines see the folder ``shared`` as
    ``/lab``. A machine takes commands from ``/lab/<its name>``.
    """

    def __init__(self, image: Path, run: Path, number: int) -> None:
        self.name = f"n{number}"
        self.console = run / f"{self.name}.console"
        self._inbox = run / "shared" / self.name
        self._inbox.mkdir()
        self._count = itertools.count()
        self._monitor = run / f"{self.name}.monitor"
        self._is_switched_off = False
        own, other = (run / f"n{n}.cable" for n in (number, 3 - number))
        # The cable is a Unix socket, which takes large frames and loses none: after a loss Soft-RoCE waits a second.
        cable = f"dgram,id=cable,local.type=unix,local.path={own},remote.type=unix,remote.path={other}"
        kernel = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr nowatchdog tsc=reliable"
        # fmt: off
        self._process = subprocess.Popen([
            "setpriv", "--pdeathsig", "KILL",
            "qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max,la57=off",
            "-M", "q35", "-smp", "1", "-m", str(_MEMORY_MIB), "-nodefaults", "-display", "none", "-no-reboot",
            "-kernel", image / "vmlinuz", "-initrd", image / "initrd",
            "-append", f"{kernel} guest.number={number}",
            "-serial", f"file:{self.console}", "-qmp", f"unix:{self._monitor},server=on,wait=off",
            "-drive", f"file={image / 'disk.img'},format=raw,if=none,id=disk,readonly=on,file.locking=off",
            "-device", "virtio-blk-pci,drive=disk",
            "-fsdev", f"local,id=lab,path={run / 'shared'},security_model=none",
            "-device", "virtio-9p-pci,fsdev=lab,mount_tag=lab",
            "-netdev", cable,
            "-device", f"virtio-net-pci,netdev=cable,mac=52:54:00:77:00:0{number},host_mtu=9000,romfile=",
            "-device", "virtio-rng-pci",
        ], stdin=subprocess.DEVNULL)
        # fmt: on

    @property
    def is_on(self) -> bool:
        return self._process.poll() is None

    def expect_on(self) -> None:
        """Raise `MachineEnded` if the machine has ended without being switched off."""
        if not self.is_on and not self._is_switched_off:
            said = self.console.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise MachineEnded(f"{self.name} ended by itself; its console:\n{said}")

    def await_boot(self) -> float:
        """Wait until the machine takes commands. Return the seconds since its kernel began."""
        return float(self.await_file(self._inbox / "up", _BOOT_S))

    def begin(self, command: str) -> Job:
        """Begin a command of bash."""
        return self._order("job", command + "\n")

    def begin_program(self, program: str, environment: Mapping[str, str]) -> Job:
        """Begin a file of `programs` in a process that has imported torch."""
        self.await_file(self._inbox / "nursery", _IMPORT_S)
        return self._order("program", json.dumps({"program": program, "environment": dict(environment)}))

    def run(self, command: str, timeout: float = _ORDER_S) -> str:
        """Run a command and return its output. Raise RuntimeError if it fails."""
        done = self.begin(command).wait(timeout)
        if done.status != 0:
            raise RuntimeError(f"{self.name}: {command}: status {done.status}\n{done.output}")
        return done.output

    def pause(self) -> None:
        """Stop the machine's processor, and with it its clock."""
        self._tell("stop")

    def resume(self) -> None:
        self._tell("cont")

    def power_off(self) -> None:
        """Switch the machine off at once, without a packet to the other machine."""
        self._is_switched_off = True
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def await_file(self, file: Path, timeout: float) -> str:
        """Wait for a command's file and return its contents. They are empty if the machine was switched off first."""
        deadline = time.monotonic() + timeout
        while not file.exists() or not (text := file.read_text(encoding="utf-8")):
            if self._is_switched_off:
                return ""
            self.expect_on()
            if time.monotonic() > deadline:
                said = "\n".join(f"-- {out.name}\n{out.read_text()[-2000:]}" for out in self._inbox.glob("*.out"))
                raise TimeoutError(f"{self.name}: no {file.name} after {timeout:.0f} s; so far:\n{said}")
            time.sleep(0.05)
        return text

    def _order(self, kind: str, text: str) -> Job:
        base = self._inbox / str(next(self._count))
        unfinished = base.with_suffix(".new")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.rename(base.with_suffix(f".{kind}"))
        return Job(self, base)

    def _tell(self, command: str) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._monitor))
            with connection.makefile("rw", encoding="utf-8") as monitor:
                monitor.readline()
                for one in ("qmp_capabilities", command):
                    monitor.write(json.dumps({"execute": one}) + "\n")
                    monitor.flush()
                    while "return" not in (answer := json.loads(monitor.readline())):
                        if "error" in answer:
                            raise RuntimeError(f"{one}: {answer['error']}")


class Machines:
    """The two machines, until the end of a ``with``. Their names are n1 and n2, their addresses 10.77.0.1 and
    10.77.0.2.

    Args:
        image: the folder of an `Image`.
        run: a folder for the machines' sockets, consoles and files. It is emptied first.

    Example::

        >>> with Machines(image.folder, Path("/tmp/run")) as machines:
        ...     print(machines.first.run("rdma link"))
    """

    def __init__(self, image: Path, run: Path) -> None:
        self.shared = run / "shared"
        with contextlib.ExitStack() as begun:
            shutil.rmtree(run, ignore_errors=True)
            self.shared.mkdir(parents=True)
            shutil.copytree(PROGRAMS, self.shared / "programs")
            both = []
            for number in (1, 2):
                both.append(Machine(image, run, number))
                begun.callback(both[-1].power_off)
            self.first, self.second = both
            self.boot_s = max(machine.await_boot() for machine in both)
            self._resources = begun.pop_all()

    @property
    def are_on(self) -> bool:
        return self.first.is_on and self.second.is_on

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Switch both machines off. Their folder stays, with the consoles."""
        self._resources.close()
