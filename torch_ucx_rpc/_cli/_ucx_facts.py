"""The section of ``info`` about UCX: the loaded UCX, its transports here, and its complaints."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch_ucx_rpc._bootstrap import network
from torch_ucx_rpc._cli._report import Report, version_of

_PROBE = Path(__file__).with_name("_ucx_probe.py")
_WHEEL = "a libucx wheel"
# UCX takes a fraction of a second to look at a machine's devices.
_PROBE_S = 60.0


def add_ucx(report: Report) -> None:
    """Ask UCX, in a process of its own."""
    choice = os.environ.get("TORCH_UCX_RPC_UCX", "")
    try:
        done = subprocess.run(
            [sys.executable, str(_PROBE), choice], capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        report.add("UCX", version=None)
        report.complain(
            f"UCX has looked at this machine's devices for {_PROBE_S:g} s without an end",
            "a driver may hang: try ibv_devinfo and nvidia-smi, and leave devices out with UCX_TLS=tcp,sm,self",
            is_fatal=True,
        )
        return
    # Leave out lines in parentheses: they only say how to silence the warning.
    complaints = re.findall(r"UCX +(WARN|ERROR) +([^( ].*)", done.stderr)
    found: dict[str, Any] | None = None
    if done.returncode == 0:
        found = json.loads(done.stdout)
    if found is None:
        died = "" if done.returncode == 0 else f" (asking it ended with code {done.returncode}: {done.stderr[-500:]})"
        report.add("UCX", version=None)
        report.complain(
            f"UCX cannot be loaded{died}",
            "pip install libucx-cu12 (libucx-cu13 beside a CUDA 13 torch), or conda install -c conda-forge ucx; "
            "TORCH_UCX_RPC_UCX, if set, must be wheel or system",
            is_fatal=True,
        )
        return
    path = Path(found["path"])
    transports: dict[str, list[str]] = {}
    for name in found["resources"] or []:
        transport, _, device = name.partition("/")
        transports.setdefault(transport, []).append(device)
    report.add(
        "UCX",
        version=".".join(map(str, found["version"])),
        path=str(path),
        source=_source(path),
        **{f"transport {transport}": devices for transport, devices in transports.items()},
        not_there=_absent(transports, path),
    )
    for level, text in complaints:
        report.complain(
            f"UCX says: {text}",
            "correct or unset the UCX_* variable in question, listed under environment",
            is_fatal=level == "ERROR" and found["resources"] is None,
        )
    _wheel(report)
    _infiniband(report, transports, path)


def _wheel(report: Report) -> None:
    """The libucx wheels: there is one for each version of CUDA, and all unpack into the same folder."""
    wheels = [name for name in ("libucx-cu11", "libucx-cu12", "libucx-cu13") if version_of(name)]
    torch_cuda = report.facts["torch"].get("built_with_CUDA")
    if len(wheels) > 1:
        report.complain(
            f"{' and '.join(wheels)} are installed, which overwrite each other's files",
            f"pip uninstall {' '.join(wheels)}; then pip install the wheel for torch's CUDA",
        )
    elif (
        wheels
        and torch_cuda
        and report.facts["UCX"]["source"] == _WHEEL
        and not wheels[0].endswith(f"cu{torch_cuda.split('.')[0]}")
    ):
        right = f"libucx-cu{torch_cuda.split('.')[0]}"
        report.complain(
            f"this torch is for CUDA {torch_cuda}, and UCX comes from {wheels[0]}, which is for another CUDA",
            f"pip uninstall {wheels[0]}; pip install {right}",
        )


def _source(path: Path) -> str:
    if "libucx" in path.parts:
        return _WHEEL
    if path.is_relative_to(os.environ.get("CONDA_PREFIX") or "/nowhere"):
        return "conda"
    return "this Python's prefix" if path.is_relative_to(sys.prefix) and sys.prefix != "/usr" else "the system"


def _absent(transports: dict[str, list[str]], path: Path) -> list[str]:
    """Kinds of transports that UCX does not offer here, with the reason."""
    absent = []
    modules = path.resolve().parent / "ucx"
    if not any(name.startswith(("rc", "dc", "ud")) for name in transports):
        has_module = network.has_verbs(str(path))
        no_verbs = "this UCX is built without verbs; conda's or the system's has them, with TORCH_UCX_RPC_UCX=system"
        absent.append(f"InfiniBand ({'no device' if has_module else no_verbs})")
    if not any(name.startswith("cuda") for name in transports):
        has_module = any(modules.glob("libuct_cuda.so*"))
        absent.append(f"CUDA ({'no device' if has_module else 'this UCX is built without CUDA'})")
    if not {"sysv", "posix"} & set(transports):
        absent.append("shared memory (excluded by UCX_TLS)")
    return absent


def _infiniband(report: Report, transports: dict[str, list[str]], path: Path) -> None:
    active = network.active_ports()
    report.add("UCX", InfiniBand_ports=active)
    if active and not any(name.startswith(("rc", "dc", "ud")) for name in transports):
        if network.has_verbs(str(path)):
            report.complain(
                "this machine has active InfiniBand or RoCE ports, and UCX does not use them",
                "check UCX_TLS and UCX_NET_DEVICES, and that /dev/infiniband is there (in a container: --device)",
            )
        else:
            report.complain(
                "this machine has active InfiniBand or RoCE ports, and this UCX is built without verbs",
                "use conda's UCX (conda install -c conda-forge ucx) or the system's, and build and run torch_ucx_rpc "
                "with TORCH_UCX_RPC_UCX=system",
            )
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if active and limit != resource.RLIM_INFINITY:
        report.complain(
            f"only {limit // 1024} KiB of memory may be locked, and InfiniBand locks all memory that it sends",
            "ulimit -l unlimited (in /etc/security/limits.conf: memlock; in a container: --ulimit memlock=-1)",
        )
