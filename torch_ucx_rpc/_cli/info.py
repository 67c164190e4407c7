"""``torch-ucx-rpc info``: facts about the installation and the machine, and problems with their cures."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

import torch_ucx_rpc
from _torch_ucx_rpc_cli import ExitCode
from torch_ucx_rpc._bootstrap import network, site_settings
from torch_ucx_rpc._cli._machine_facts import add_machine
from torch_ucx_rpc._cli._report import Report, version_of
from torch_ucx_rpc._cli._ucx_facts import add_ucx

# Optional packages, and the features that need them.
_OPTIONAL = {
    "rich": "check, top",
    "prometheus_client": "the option prometheus_port",
    "mpi4py": "rank 0's address under mpirun",
    "rmm": "the option device_pool, and device buffers as arguments",
    "numba": "native_op, and device arrays as arguments",
}
_OWN_VARIABLES = {
    "TORCH_UCX_RPC_INIT_METHOD",
    "TORCH_UCX_RPC_KEEP_NOFILE",
    "TORCH_UCX_RPC_REPLACE_TENSORPIPE",
    "TORCH_UCX_RPC_SECRET",
    "TORCH_UCX_RPC_SECRET_FILE",
    "TORCH_UCX_RPC_TRACE",
    "TORCH_UCX_RPC_UCX",
}
_VARIABLES = re.compile(
    r"(UCX|TORCH_UCX_RPC|MASTER)_.*|RANK|WORLD_SIZE|LOCAL_RANK|LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES"
)


def main(arguments: argparse.Namespace) -> int:
    report = collect()
    if arguments.json:
        problems = [problem._asdict() for problem in report.problems]
        print(json.dumps({**report.facts, "problems": problems}, indent=2))
    else:
        print(_text(report))
    if any(problem.is_fatal for problem in report.problems):
        return ExitCode.BROKEN
    return ExitCode.WARNINGS if arguments.strict and report.problems else ExitCode.OK


def collect() -> Report:
    """The full report."""
    report = Report()
    _package(report)
    _torch(report)
    add_ucx(report)
    report.add("optional packages", **{name: version_of(name) or f"none ({use})" for name, use in _OPTIONAL.items()})
    add_machine(report)
    _environment(report)
    return report


def _text(report: Report) -> str:
    lines = []
    for section, facts in report.facts.items():
        lines.append(section)
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            # Names of variables and packages stay as they are.
            label = name if section in ("environment", "optional packages") else name.replace("_", " ")
            lines.append(f"  {label:{width}}  {_shown(value)}")
    lines.append("")
    for problem in report.problems:
        lines += [f"PROBLEM  {problem.problem}", f"   CURE  {problem.cure}"]
    if not report.problems:
        lines.append("No problems found.")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


# ---- Installed packages ----------------------------------------------------------------------------------------------


def _package(report: Report) -> None:
    built: Any = None
    if (Path(torch_ucx_rpc.__file__).parent / "_build_info.py").exists():
        built = importlib.import_module("torch_ucx_rpc._build_info")
    failure = torch_ucx_rpc._failure
    report.add(
        "torch_ucx_rpc",
        version=torch_ucx_rpc.__version__,
        path=str(Path(torch_ucx_rpc.__file__).parent),
        extension="loaded" if failure is None else "cannot be loaded",
        built_for_torch=built and built.BUILT_FOR_TORCH,
        built_with_UCX=built and built.BUILT_FOR_UCX,
        python=f"{platform.python_version()} ({sys.executable})",
    )
    if isinstance(failure, ImportError) and failure.name == "torch_ucx_rpc":
        # The text is "problem: cure". The first colon outside parentheses separates them.
        sentence = re.fullmatch(r"((?:\([^)]*\)|[^(:]|:(?! ))*): (.*)", str(failure), re.DOTALL)
        problem, cure = sentence.groups() if sentence else (str(failure), "do what that text says")
        report.complain(problem, cure, is_fatal=True)
    elif failure is not None:
        report.complain(
            f"the import fails: {failure}", "see the section about torch; install torch again", is_fatal=True
        )


def _torch(report: Report) -> None:
    try:
        import torch
    except (ImportError, OSError) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        report.add("torch", version=version_of("torch"))
        report.complain(
            "torch is not installed" if is_absent else f"torch cannot be imported: {error}",
            "pip install torch; then build torch_ucx_rpc with it, pip install --no-build-isolation <source tree>",
            is_fatal=True,
        )
        return
    has_cuda = torch.cuda.is_available()
    report.add(
        "torch",
        version=torch.__version__,
        path=str(Path(torch.__file__).parent),
        rpc=torch.distributed.is_available() and torch.distributed.rpc.is_available(),
        built_with_CUDA=torch.version.cuda,
        CUDA_devices=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if has_cuda else [],
    )
    if torch.version.cuda and not has_cuda:
        report.add("torch", CUDA="not available: no driver, no device, or none in CUDA_VISIBLE_DEVICES")


# ---- The environment -------------------------------------------------------------------------------------------------


def _environment(report: Report) -> None:
    report.problems += site_settings.of_settings(os.environ)
    shown = {name: os.environ[name] for name in sorted(os.environ) if _VARIABLES.fullmatch(name)}
    if "TORCH_UCX_RPC_SECRET" in shown:
        shown["TORCH_UCX_RPC_SECRET"] = "(not shown)"  # users send reports to others
    report.add("environment", **shown)
    for name in os.environ:
        if name.startswith("TORCH_UCX_RPC_") and name not in _OWN_VARIABLES:
            report.complain(
                f"torch_ucx_rpc has no variable {name}",
                f"unset it, or correct its name: there are {', '.join(sorted(_OWN_VARIABLES))}",
            )
    if "MASTER_ADDR" in os.environ:
        _rendezvous(report, os.environ["MASTER_ADDR"])


def _rendezvous(report: Report, host: str) -> None:
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except (OSError, UnicodeError) as error:
        report.complain(
            f"MASTER_ADDR={host} cannot be resolved on this host ({getattr(error, 'strerror', error)})",
            "set it to an address of rank 0's host, or to a name of that host that every host knows",
        )
        return
    report.add("environment", MASTER_ADDR_is=address)
    interface = network.interface_to(host)
    report.add("environment", interface_to_it=interface)
    if interface is None:
        report.complain(
            f"there is no route from this host to MASTER_ADDR={host} ({address})",
            "check the address and this host's network; workers here cannot join a job there",
        )
    chosen = os.environ.get("UCX_NET_DEVICES", "all")
    if interface not in (None, "lo") and chosen != "all" and interface not in chosen.split(","):
        report.complain(
            f"UCX_NET_DEVICES={chosen} leaves out {interface}, which leads to MASTER_ADDR={host}",
            f"add {interface}, or unset UCX_NET_DEVICES, unless the other devices lead to all workers too",
        )
