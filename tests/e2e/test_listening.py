"""UCX listens only on the devices that the job's variables name."""

from __future__ import annotations

import functools
import ipaddress
import re
import struct
from pathlib import Path

import pytest
import torch.distributed.rpc as rpc

from tests.support import workers

pytestmark = pytest.mark.ucx_only


def listening() -> set[str]:
    """Return the addresses at which this process listens with TCP."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        except FileNotFoundError:
            continue  # the descriptor by which iterdir reads the folder
        if found:
            inodes.add(found[1])
    addresses = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                words = bytes.fromhex(local.partition(":")[0])
                packed = b"".join(word[0].to_bytes(4, "big") for word in struct.iter_unpack("<I", words))
                addresses.add(str(ipaddress.ip_address(packed)))
    return addresses


def call_and_list(rank: int) -> set[str]:
    rpc.rpc_sync(workers.worker_name(1 - rank), listening)
    return listening()


def test_with_tcp_ucx_listens_on_the_named_devices(rpc_backend: str) -> None:
    run = functools.partial(workers.run_workers, backend=rpc_backend, transport=workers.Transport.TCP)
    # Ask worker 1, since rank 0 hosts the Store.
    _, addresses = run(2, call_and_list, env={"UCX_NET_DEVICES": "lo"})
    assert addresses == {"127.0.0.1"}
