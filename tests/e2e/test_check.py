"""``python -m torch_ucx_rpc check`` as a program: its workers, its exit codes, two hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from _torch_ucx_rpc_cli import ExitCode
from tests.support.labs import VirtualHosts, needs_virtual_hosts

# ---- Run -------------------------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "torch_ucx_rpc", "check"]


def environment(**variables: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def test_check_starts_workers_and_warnings_set_its_exit_code() -> None:
    done = subprocess.run([*COMMAND, "--json"], env=environment(), capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert [(pair["caller"], pair["callee"]) for pair in report["pairs"]] == [
        ("worker0", "worker1"),
        ("worker1", "worker0"),
    ]
    assert all(pair["latency_us"] > 0 and pair["bytes_per_s"] > 0 for pair in report["pairs"])
    assert report["warnings"] == report["errors"] == []
    done = subprocess.run(COMMAND, env=environment(UCX_TLS="tcp,self"), capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.WARNINGS, done.stderr
    assert "WARNING: worker0 and worker1 are both on" in done.stdout
    assert "UCX_TLS=tcp,self leaves it out" in done.stdout


def test_check_has_an_exit_code_for_missing_workers() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [*COMMAND, "--timeout", "0.5", "--json"]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (ExitCode.UNREACHABLE, ""), done.stderr
    assert "check: init_rpc has waited 0.5 s" in done.stderr


def test_on_two_hosts_a_dead_interface_is_avoided() -> None:
    needs_virtual_hosts()
    variables = environment(MASTER_ADDR="a", MASTER_PORT="29500", WORLD_SIZE="2")
    with VirtualHosts(["a", "b"]) as hosts:
        for number, host in enumerate(hosts, 1):
            # UCX prefers this interface for its packet size. By its address it seems to lead to the other host. UCX
            # finds interfaces in /sys. Until /sys is mounted again, it shows the machine's interfaces.
            script = f"""
                mount -t sysfs sysfs /sys
                ip link add nowhere type veth peer name end mtu 9000
                ip link set nowhere mtu 9000
                ip addr add 10.99.0.{number}/24 dev nowhere
                ip link set nowhere up
                ip link set end up
            """
            host.run(["sh", "-euc", script], check=True)
        workers = [
            host.popen([*COMMAND, "--json"], env={**variables, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank, host in enumerate(hosts)
        ]
        report = json.loads(workers[0].communicate()[0])
        workers[1].communicate()
    assert [pair["lanes"] for pair in report["pairs"]] == [["tcp/eth0"], ["tcp/eth0"]]
    assert [report["workers"][name]["address"] for name in ("worker0", "worker1")] == ["10.78.0.1", "10.78.0.2"]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert report["warnings"] == report["errors"] == []
