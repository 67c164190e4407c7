"""Hosts on one machine, made of namespaces: `VirtualHosts`."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_NETWORK = "10.78.0"


class VirtualHosts(Sequence["VirtualHost"]):
    """Hosts that share only this machine's files, until ``close()`` or the end of a ``with``.

    Each has its own network, host name, ``/dev/shm``, System V IPC and processes, and resolves the names of all. A
    switch joins the hosts and leads nowhere else, so that several labs can be up at the same time. One more host,
    ``head``, is on the switch, for launchers. It sees the processes of this machine.

    Args:
        names: the hosts' names, at most 250. Their addresses are 10.78.0.1, 10.78.0.2, ...; that of ``head`` is
            10.78.0.254.

    Example::

        >>> with VirtualHosts(["a", "b"]) as (a, b):
        ...     a.run(["ping", "-c1", "b"], check=True)
        ...     b.cut()
    """

    def __init__(self, names: Sequence[str]) -> None:
        addresses = {"head": f"{_NETWORK}.254", **{name: f"{_NETWORK}.{i}" for i, name in enumerate(names, 1)}}
        with contextlib.ExitStack() as begun:
            self._directory = Path(begun.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
            hosts_file = self._directory / "hosts"
            lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items()]
            hosts_file.write_text("".join(lines))
            self.head = VirtualHost("head", addresses["head"], hosts_file, switch=None)
            begun.callback(self.head.power_off)
            self._hosts = []
            for name in names:
                host = VirtualHost(name, addresses[name], hosts_file, switch=self.head)
                begun.callback(host.power_off)
                self._hosts.append(host)
            self.remote_shell = self._write_remote_shell()
            self._resources = begun.pop_all()

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> VirtualHosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the hosts, and all programs on them (not on ``head``)."""
        self._resources.close()

    def _write_remote_shell(self) -> Path:
        """Write a program that replaces ssh on ``head``: ``remote-shell [options] HOST COMMAND...``"""
        cases = "".join(f"  {host.name} | {host.address}) pid={host.pid} ;;\n" for host in self._hosts)
        script = self._directory / "remote-shell"
        script.write_text(
            f"""#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1
shift
case $host in
{cases}  *) echo "there is no host $host" >&2; exit 255 ;;
esac
exec nsenter --target $pid --net --ipc --uts --mount --pid --wd="$PWD" -- bash -c "$*"
"""
        )
        script.chmod(0o755)
        return script


class VirtualHost:
    """One of `VirtualHosts`, or their ``head``."""

    def __init__(self, name: str, address: str, hosts_file: Path, switch: VirtualHost | None) -> None:
        self.name = name
        self.address = address
        # The head must see the hosts' processes, to start others there.
        self._spaces = ["--net", "--ipc", "--uts", "--mount", *([] if switch is None else ["--pid"])]
        set_up = [
            f"hostname {name}",
            "mount -t tmpfs tmpfs /dev/shm",
            f"mount --bind {hosts_file} /etc/hosts",
            # The machine's default congestion control could be bbr, which may pause a connection for seconds after a
            # cut (docs/failure_model.md).
            "echo reno > /proc/sys/net/ipv4/tcp_congestion_control",
            "ip link set lo up",
            *([] if switch else ["ip link add eth0 type bridge"]),
            "echo up",
            "exec sleep infinity",
        ]
        # The parent of the host's first process. The host ends with either, and both end with this process.
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *self._spaces, "--fork", "--kill-child"]
            + ([] if switch is None else ["--mount-proc"])
            + ["sh", "-euc", "; ".join(set_up)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._holder.stdout.readline() != "up\n":
            _, reason = self._holder.communicate()
            raise RuntimeError(f"the virtual host {name} has not come up: {reason.strip()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.pid = int(children[0])
        self._switch = switch
        if switch is not None:
            # The switch's end of the host's cable.
            self._port = f"port{self.pid}"
            # Enter only the network of the switch, so that pids mean the same as here.
            plug = f"ip link add {self._port} type veth peer name eth0 netns {self.pid}"
            switch._on_network(plug)
            switch._on_network(f"ip link set {self._port} master eth0 up")
        self._on_network(f"ip addr add {address}/24 dev eth0")
        self._on_network("ip link set eth0 up")
        self._on_network("ip route add default dev eth0")

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess:
        """``subprocess.run`` on this host."""
        return subprocess.run([*self._entering(options), *command], **options)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """``subprocess.Popen`` on this host. ``kill()`` ends the program. Other signals reach it on ``head`` only."""
        return subprocess.Popen([*self._entering(options), "setpriv", "--pdeathsig", "KILL", *command], **options)

    def cut(self) -> None:
        """Pull the cable: packets are lost, and programs get no error."""
        self._switch._on_network(f"ip link set {self._port} down")

    def cut_for(self, seconds: float) -> None:
        """`cut`, and `heal` after ``seconds``, even if this process is busy then. Returns after the cut."""
        link = f"ip link set {self._port}"
        # The waiting shell must hold no pipe of this process.
        self._switch._on_network(f"sh -euc '{link} down; (sleep {seconds}; {link} up) > /dev/null 2>&1 &'")

    def heal(self) -> None:
        """Plug the cable in again."""
        self._switch._on_network(f"ip link set {self._port} up")

    def link_down(self) -> None:
        """Take the host's own network device down: its programs cannot send, and get errors."""
        self._on_network("ip link set eth0 down")

    def link_up(self) -> None:
        """Undo `link_down`, which has also removed a route."""
        self._on_network("ip link set eth0 up")
        self._on_network("ip route add default dev eth0")

    def reset_connections(self) -> None:
        """Reset the TCP connections of this host's programs to the other hosts, but not those to ``head``."""
        others = f"dst {_NETWORK}.0/24 and not dst {_NETWORK}.254 and not dst {self.address}"
        subprocess.run(
            ["nsenter", "--target", str(self.pid), "--net", "--", "ss", "--kill", "--tcp", "--numeric", others],
            stdout=subprocess.DEVNULL,
            check=True,
        )

    @contextlib.contextmanager
    def slowed_down(self, megabits: int) -> Iterator[None]:
        """Limit the cable to this many megabits a second each way, during the block."""
        with contextlib.ExitStack() as slow:
            for host, end in ((self._switch, self._port), (self, "eth0")):
                host._on_network(f"tc qdisc add dev {end} root tbf rate {megabits}mbit burst 128kb latency 50ms")
                slow.callback(host._on_network, f"tc qdisc del dev {end} root")
            yield

    def power_off(self) -> None:
        """End the host at once, with all its programs, and without a packet to the others."""
        if self._holder.poll() is not None:
            return
        if self._switch is not None:
            # Remove the cable too, which would outlive the host for a moment.
            self._switch._on_network(f"ip link del {self._port}")
        os.kill(self.pid, 9)
        self._holder.communicate()

    def _entering(self, options: dict[str, Any]) -> list[str]:
        # A process that enters a mount namespace starts at its root.
        folder = options.get("cwd") or Path.cwd()
        return ["nsenter", "--target", str(self.pid), *self._spaces, f"--wd={folder}", "--"]

    def _on_network(self, command: str) -> None:
        subprocess.run(["nsenter", "--target", str(self.pid), "--net", "--", *shlex.split(command)], check=True)
