"""``torch-ucx-rpc info``: facts about the installation and the machine, and problems with their cures."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import errno
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch_ucx_rpc
from _torch_ucx_rpc_cli import ExitCode
from torch_ucx_rpc._bootstrap import network, site_settings
from torch_ucx_rpc._bootstrap.site_settings import Problem

_PROBE = Path(__file__).with_name("_ucx_probe.py")
_WHEEL = "a libucx wheel"
# UCX takes a fraction of a second to look at a machine's devices.
_PROBE_S = 60.0
_MIB = 1 << 20

# Packages that this one can use, and for what.
_OPTIONAL = {
    "rich": "check, top",
    "prometheus_client": "the option prometheus_port",
    "mpi4py": "rank 0's address under mpirun",
    "rmm": "the option device_pool, and device buffers as arguments",
    "numba": "native_op, and device arrays as arguments",
}
_OWN_VARIABLES = {
    "TORCH_UCX_RPC_INIT_METHOD",
    "TORCH_UCX_RPC_REPLACE_TENSORPIPE",
    "TORCH_UCX_RPC_SECRET",
    "TORCH_UCX_RPC_SECRET_FILE",
    "TORCH_UCX_RPC_TRACE",
    "TORCH_UCX_RPC_UCX",
}
_VARIABLES = re.compile(
    r"(UCX|TORCH_UCX_RPC|MASTER)_.*|RANK|WORLD_SIZE|LOCAL_RANK|LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES"
)

# Below these limits, jobs fail that run elsewhere. A Docker container has 64 MiB of shared memory.
_LEAST_SHARED_MEMORY = 256 * _MIB
_LEAST_FILES = 4096


@dataclasses.dataclass
class Report:
    """Facts by section and name, and the problems among them."""

    facts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def add(self, section: str, **facts: Any) -> None:
        self.facts.setdefault(section, {}).update(facts)

    def complain(self, problem: str, cure: str, *, is_fatal: bool = False) -> None:
        self.problems.append(Problem(problem, cure, is_fatal))


def main(arguments: argparse.Namespace) -> int:
    report = collect()
    if arguments.json:
        problems = [dataclasses.asdict(problem) for problem in report.problems]
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
    _ucx(report)
    report.add("optional packages", **{name: _version(name) or f"none ({use})" for name, use in _OPTIONAL.items()})
    _machine(report)
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    if isinstance(failure, importlib.metadata.PackageNotFoundError):
        report.complain(
            "the package is found as a folder, but it has not been installed",
            "pip install --no-build-isolation <source tree>, or `make build` there",
            is_fatal=True,
        )
    elif isinstance(failure, ImportError) and failure.name == "torch_ucx_rpc":
        # Problem and cure in one sentence, between them the first colon that is in no parentheses.
        sentence = re.fullmatch(r"((?:\([^)]*\)|[^(:]|:(?! ))*): (.*)", str(failure), re.DOTALL)
        problem, cure = sentence.groups() if sentence else (str(failure), "see there")
        report.complain(problem, cure, is_fatal=True)
    elif failure is not None:
        report.complain(
            f"the import fails: {failure}", "see what is said of torch here; install torch again", is_fatal=True
        )


def _torch(report: Report) -> None:
    try:
        import torch
    except (ImportError, OSError) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        report.add("torch", version=_version("torch"))
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


# ---- UCX -------------------------------------------------------------------------------------------------------------


def _ucx(report: Report) -> None:
    choice = os.environ.get("TORCH_UCX_RPC_UCX", "")
    done = subprocess.run(
        [sys.executable, str(_PROBE), choice], capture_output=True, text=True, timeout=_PROBE_S, check=False
    )
    # Lines in parentheses are left out: they only say how to silence the warning.
    complaints = re.findall(r"UCX +(WARN|ERROR) +([^( ].*)", done.stderr + done.stdout)
    found: dict[str, Any] | None = None
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1])
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
            "correct the UCX_* variable that it is about, listed under environment, or unset it",
            is_fatal=level == "ERROR" and found["resources"] is None,
        )
    _wheel(report)
    _infiniband(report, transports, path)


def _wheel(report: Report) -> None:
    """The libucx wheels: there is one for each version of CUDA, and all unpack into the same folder."""
    wheels = [name for name in ("libucx-cu11", "libucx-cu12", "libucx-cu13") if _version(name)]
    torch_cuda = report.facts["torch"].get("built_with_CUDA")
    if len(wheels) > 1:
        report.complain(
            f"{' and '.join(wheels)} are installed, which overwrite each other's files",
            f"pip uninstall {' '.join(wheels)}; then pip install the one of torch's CUDA",
        )
    elif (
        wheels
        and torch_cuda
        and report.facts["UCX"]["source"] == _WHEEL
        and not wheels[0].endswith(f"cu{torch_cuda.split('.')[0]}")
    ):
        right = f"libucx-cu{torch_cuda.split('.')[0]}"
        report.complain(
            f"this torch is for CUDA {torch_cuda}, and UCX comes from {wheels[0]}, which is for another one",
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
            f"only {limit // 1024} KiB of memory may be locked, which InfiniBand has to do with all that it sends",
            "ulimit -l unlimited (in /etc/security/limits.conf: memlock; in a container: --ulimit memlock=-1)",
        )


# ---- The machine -----------------------------------------------------------------------------------------------------


def _machine(report: Report) -> None:
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    report.add(
        "machine",
        host=socket.gethostname(),
        system=platform.platform(),
        cores_for_this_process=len(os.sched_getaffinity(0)),
        container=_container(),
        shared_memory="no /dev/shm" if shared is None else f"{_mib(shared.free)} free of {_mib(shared.total)}",
        open_files=f"{files} (can be raised to {most_files})",
        locked_memory="unlimited" if locked == resource.RLIM_INFINITY else f"{locked // 1024} KiB",
        reading_other_processes=_reading_other_processes(),
        interfaces=[name for _, name in socket.if_nameindex()],
    )
    if shared is None or shared.free < _LEAST_SHARED_MEMORY:
        report.complain(
            f"shared memory is small: {_mib(0 if shared is None else shared.free)} free in /dev/shm, in which workers "
            f"of one host talk to each other",
            "in a container: --shm-size=1g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm; "
            "otherwise remove what is left over in /dev/shm",
        )
    if files < _LEAST_FILES:
        report.complain(
            f"a process may open {files} files, and each worker needs some for each peer it talks to over TCP",
            f"ulimit -n {min(65536, most_files) if most_files > 0 else 65536} before starting the workers",
        )


def _container() -> str | None:
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    return os.environ.get("container")  # noqa: SIM112 - systemd's, which is lower case


def _reading_other_processes() -> str:
    """Whether UCX could use its transport cma here. The agent works without it."""
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = (ctypes.c_size_t * 2)(0, 1)
    with subprocess.Popen(["sleep", "60"]) as other:
        # Nothing is at address 0, but the kernel checks the permission first.
        libc.process_vm_readv(other.pid, nothing, 1, nothing, 1, 0)
        answer = "allowed" if ctypes.get_errno() == errno.EFAULT else f"refused, {os.strerror(ctypes.get_errno())}"
        other.kill()
    scope = _read(Path("/proc/sys/kernel/yama/ptrace_scope")) or "none"
    return f"{answer} (ptrace_scope: {scope}); cma is not used, so either will do"


def _mib(size: int) -> str:
    return f"{size // _MIB} MiB"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# ---- The environment -------------------------------------------------------------------------------------------------


def _environment(report: Report) -> None:
    report.problems += site_settings.of_settings(os.environ)
    shown = {name: os.environ[name] for name in sorted(os.environ) if _VARIABLES.fullmatch(name)}
    if "TORCH_UCX_RPC_SECRET" in shown:
        shown["TORCH_UCX_RPC_SECRET"] = "(not shown)"  # reports are passed on
    report.add("environment", **shown)
    for name in os.environ:
        if name.startswith("TORCH_UCX_RPC_") and name not in _OWN_VARIABLES:
            report.complain(
                f"the variable {name} means nothing to torch_ucx_rpc",
                f"unset it, or correct its name: there are {', '.join(sorted(_OWN_VARIABLES))}",
            )
    if "MASTER_ADDR" in os.environ:
        _rendezvous(report, os.environ["MASTER_ADDR"])


def _rendezvous(report: Report, host: str) -> None:
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError as error:
        report.complain(
            f"MASTER_ADDR={host} cannot be resolved on this host ({error.strerror})",
            "set it to an address, or to a name that every host knows, of the host of rank 0",
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
