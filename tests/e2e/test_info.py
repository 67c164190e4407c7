"""``python -m torch_ucx_rpc info`` prints facts and problems with their cures, even if the package cannot be
imported."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_ucx_rpc
from _torch_ucx_rpc_cli import ExitCode, main
from torch_ucx_rpc import _native
from torch_ucx_rpc._bootstrap.site_settings import Problem
from torch_ucx_rpc._cli import _machine_facts, _ucx_facts, info
from torch_ucx_rpc._cli._report import Report

PACKAGE = Path(torch_ucx_rpc.__file__).parent
EXTENSION = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def problems(report: info.Report) -> str:
    return "\n".join(f"{problem.problem} -> {problem.cure}" for problem in report.problems)


@pytest.fixture(autouse=True)
def _no_variables_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("UCX_", "TORCH_UCX_RPC_", "MASTER_")):
            monkeypatch.delenv(name)


def test_a_resolver_that_does_not_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(_machine_facts, "_SLOW_RESOLVER_S", 0.05)
    monkeypatch.setattr(_machine_facts.socket, "getnameinfo", lambda client, flags: answered.wait())
    report = info.collect()
    answered.set()
    assert report.facts["machine"]["resolver"].startswith("no answer in 0.")
    assert "the resolver has not found the name of " in problems(report)


# ---- Here ------------------------------------------------------------------------------------------------------------


def test_the_report_has_the_installation_and_the_machine() -> None:
    report = info.collect()
    facts = report.facts
    assert facts["torch_ucx_rpc"]["version"] == torch_ucx_rpc.__version__
    assert facts["torch_ucx_rpc"]["extension"] == "loaded"
    assert facts["torch"]["version"] == torch.__version__
    ucx = _native.loaded_ucx()
    assert ucx is not None
    assert facts["UCX"]["version"] == ".".join(map(str, ucx.version))
    assert Path(facts["UCX"]["path"]).samefile(ucx.path)
    assert "memory" in facts["UCX"]["transport sysv"]
    assert "lo" in facts["UCX"]["transport tcp"]
    assert facts["machine"]["open_files"]
    assert not any(problem.is_fatal for problem in report.problems)


def test_buffered_c_log_does_not_mix_with_the_answer() -> None:
    code = """
import ctypes, runpy, sys
ctypes.CDLL(None).puts(b"of C")
runpy.run_path(sys.argv[1], run_name="__main__")
"""
    command = [sys.executable, "-c", code, str(_ucx_facts._PROBE)]
    # PYTHONUNBUFFERED would keep the C library from buffering.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["version"]
    assert "of C" in done.stderr


def test_a_ucx_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(_ucx_facts, "_PROBE", probe)
    monkeypatch.setattr(_ucx_facts, "_PROBE_S", 0.5)
    report = Report()
    _ucx_facts.add_ucx(report)
    [problem] = report.problems
    assert problem.is_fatal
    assert "for 0.5 s without an end" in problem.problem


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["UCX"]["path"] in text
    assert all(problem["cure"] in text for problem in facts.pop("problems"))
    assert list(facts) == [line for line in text.splitlines() if line in facts]


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"UCX_TLS": "nosuch"}, "UCX says: transport 'nosuch' is not available"),
        ({"UCX_NET_DEVICES": "eth77"}, "UCX says: network device 'eth77' is not available"),
        ({"UCX_TSL": "tcp"}, "UCX says: unused environment variable: UCX_TSL (maybe: UCX_TLS?)"),
        ({"UCX_TLS": "self"}, "UCX_TLS=self leaves no transport by which messages reach another worker"),
        ({"UCX_MM_ERROR_HANDLING": "n"}, "workers of one host cannot use shared memory and take TCP -> unset it"),
        ({"TORCH_UCX_RPC_UXC": "wheel"}, "torch_ucx_rpc has no variable TORCH_UCX_RPC_UXC"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR=no-such-host.invalid cannot be resolved"),
        ({"MASTER_ADDR": "no..host"}, "MASTER_ADDR=no..host cannot be resolved"),
    ],
)
def test_a_variable_that_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], complaint: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert complaint in problems(info.collect())


def test_a_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCH_UCX_RPC_SECRET", "swordfish and sixteen bytes")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "TORCH_UCX_RPC_SECRET" in text
    assert "swordfish" not in text


def test_every_variable_of_ucx_and_ours_is_known() -> None:
    files = {*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.cpp"), PACKAGE.parent / "_torch_ucx_rpc_autoload.py"}
    files.remove(PACKAGE / "_cli" / "info.py")
    read = {name for file in files for name in re.findall(r'"(TORCH_UCX_RPC_[A-Z_]+)"', file.read_text("utf-8"))}
    assert read == info._OWN_VARIABLES


def test_devices_that_cannot_reach_rank_0_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(info.network, "interface_to", lambda host: "eth7")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    assert "UCX_NET_DEVICES=lo leaves out eth7, which leads to MASTER_ADDR=127.0.0.1" in problems(info.collect())
    monkeypatch.setenv("UCX_NET_DEVICES", "lo,eth7")
    assert "leaves out" not in problems(info.collect())


def test_infiniband_that_ucx_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info.network, "active_ports", lambda: ["mlx5_0:1"])
    monkeypatch.setattr(info.network, "has_verbs", lambda path: False)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (65536, 65536))
    text = problems(info.collect())
    assert "this UCX is built without verbs -> use conda's UCX" in text
    assert "only 64 KiB of memory may be locked" in text


def test_little_shared_memory_and_few_files_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(64 << 20, 1 << 20, 63 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1024, 1024))
    text = problems(info.collect())
    assert "shared memory is small: 63 MiB free in /dev/shm" in text
    assert "--shm-size=1g" in text
    assert "a process may open 1024 files" in text
    assert "raise the hard limit: ulimit -Hn 65536 as root" in text
    # init_rpc raises the soft limit by default.
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1024, 1 << 20))
    assert "a process may open" not in problems(info.collect())
    monkeypatch.setenv("TORCH_UCX_RPC_KEEP_NOFILE", "1")
    assert "a process may open 1024 files" in (text := problems(info.collect()))
    assert "unset TORCH_UCX_RPC_KEEP_NOFILE" in text


def test_a_container_without_programs_is_reported_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ptrace_scope" in info.collect().facts["machine"]["reading_other_processes"]


@pytest.mark.parametrize(
    ("wheels", "cuda", "complaint", "cure"),
    [
        ({"libucx-cu12"}, "13.0", "this torch is for CUDA 13.0, and UCX comes from libucx-cu12", "install libucx-cu13"),
        ({"libucx-cu13"}, "12.8", "this torch is for CUDA 12.8, and UCX comes from libucx-cu13", "install libucx-cu12"),
        ({"libucx-cu12", "libucx-cu13"}, None, "libucx-cu12 and libucx-cu13 are installed", "pip uninstall"),
        ({"libucx-cu12"}, "12.8", None, ""),
        ({"libucx-cu12"}, None, None, ""),
        (set(), "13.0", None, ""),
    ],
)
def test_a_ucx_for_another_cuda_than_torchs_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, wheels: set[str], cuda: str | None, complaint: str | None, cure: str
) -> None:
    monkeypatch.setattr(_ucx_facts, "version_of", lambda name: "1" if name in wheels else None)
    monkeypatch.setattr(_ucx_facts, "_source", lambda path: _ucx_facts._WHEEL)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = [p for p in info.collect().problems if "libucx-cu" in p.problem]
    assert [(complaint in p.problem, cure in p.cure, p.is_fatal) for p in found] == (
        [] if complaint is None else [(True, True, False)]
    )


def test_strict_has_an_exit_code_for_problems_that_are_not_fatal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = Problem("a problem", "its cure")
    for problems, code, strict in (([], 0, 0), ([problem], 0, ExitCode.WARNINGS)):
        monkeypatch.setattr(info, "collect", lambda problems=problems: info.Report(problems=problems))
        assert main(["info"]) == code
        assert main(["info", "--strict"]) == strict
        assert main(["info", "--strict", "--json"]) == strict
    fatal = Problem("a problem", "its cure", is_fatal=True)
    monkeypatch.setattr(info, "collect", lambda: info.Report(problems=[problem, fatal]))
    assert main(["info", "--strict"]) == main(["info"]) == ExitCode.BROKEN


# ---- Where the package cannot be imported ----------------------------------------------------------------------------


def without_extension(package: Path) -> None:
    (package / EXTENSION).unlink()


def with_nonsense_as_extension(package: Path) -> None:
    without_extension(package)
    (package / EXTENSION).write_bytes(b"not a library")


def for_another_torch(package: Path) -> None:
    (package / "_build_info.py").unlink()
    (package / "_build_info.py").write_text("BUILT_FOR_TORCH = '1.0.0'\nBUILT_FOR_UCX = '1.14'\n")


def without_torch(package: Path) -> None:
    (package.parent / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")


def with_a_broken_torch(package: Path) -> None:
    (package.parent / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")


@pytest.mark.parametrize(
    ("harm", "problem", "cure"),
    [
        (without_extension, "the extension has not been built in", "make build"),
        (with_nonsense_as_extension, "the extension cannot be loaded (", "run `make build`"),
        (for_another_torch, "torch_ucx_rpc was built for torch 1.0.0 and this is torch", "build it again"),
        (without_torch, "torch is not installed", "pip install torch"),
        (with_a_broken_torch, "torch cannot be imported: libtorch_cpu.so: cannot open", "pip install torch"),
    ],
)
def test_a_broken_installation_is_reported_with_the_cure(
    tmp_path: Path, harm: Callable[[Path], None], problem: str, cure: str
) -> None:
    package = tmp_path / "torch_ucx_rpc"
    package.mkdir()
    rooms = [file.parent for file in PACKAGE.glob("*/__init__.py")]
    for file in [*PACKAGE.glob("*.py"), *rooms, PACKAGE / EXTENSION]:
        (package / file.name).symlink_to(file)
    harm(package)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "torch_ucx_rpc", "info", "--json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    [told] = [p for p in report["problems"] if p["problem"].startswith(problem)]
    assert cure in told["cure"]
    assert told["problem"].count("(") == told["problem"].count(")")
    # The report still has the other facts.
    assert report["UCX"]["version"]
    assert report["machine"]["host"]


def test_other_commands_fail_as_the_import_does(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "torch_ucx_rpc", "check"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No module named 'torch'" in done.stderr
