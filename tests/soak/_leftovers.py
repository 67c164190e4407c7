"""What workers leave behind on their hosts when all have ended: `leftovers`."""

from __future__ import annotations

from labs import VirtualHosts


def leftovers(hosts: VirtualHosts) -> list[str]:
    """Processes, files in ``/dev/shm`` and System V segments, each with its host."""
    return [f"{host.name}: {line}" for host in hosts for look in (_processes, _files, _segments) for line in look(host)]


def _processes(host) -> list[str]:
    # Its first, which is the host, and this look.
    listed = host.run(["sh", "-c", "cat /proc/[0-9]*/comm"], capture_output=True, text=True, check=False).stdout
    return [f"process {name}" for name in listed.split() if name not in ("sleep", "sh", "cat")]


def _files(host) -> list[str]:
    listed = host.run(["ls", "/dev/shm"], capture_output=True, text=True, check=True).stdout
    return [f"/dev/shm/{name}" for name in listed.split()]


def _segments(host) -> list[str]:
    rows = host.run(["cat", "/proc/sysvipc/shm"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [f"System V segment {row.split()[1]} of {row.split()[3]} bytes" for row in rows[1:]]
