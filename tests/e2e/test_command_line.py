"""The whole command line: imports, errors, streams and exit codes."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import _torch_ucx_rpc_cli
from _torch_ucx_rpc_cli import COMMANDS, ExitCode, main

ROOT = Path(__file__).resolve().parents[2]
NAMES = [add.__name__.removeprefix("_") for add in COMMANDS]
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def entry_point() -> str:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    scripts = config["options.entry_points"]["console_scripts"].split("\n")
    return dict(re.split(r"\s*=\s*", script) for script in scripts if script)["torch-ucx-rpc"]


def torch_ucx_rpc(*arguments: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program that pip makes for the entry point, under its name. ``after`` runs at its end."""
    module, _, function = entry_point().partition(":")
    code = f"""
import sys
from {module} import {function}
sys.argv = ["/somewhere/bin/torch-ucx-rpc", *sys.argv[1:]]
try:
    sys.exit({function}())
finally:
    pass
    {after}
"""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=120, check=False)


# ---- Help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in NAMES), ["run", "-n", "x"]]
)
def test_help_and_wrong_arguments_do_not_import_torch(arguments: list[str]) -> None:
    done = torch_ucx_rpc(*arguments, after="print(sorted({'torch', 'torch_ucx_rpc', 'numpy'} & set(sys.modules)))")
    if arguments[-1] == "x":
        assert done.returncode == ExitCode.WRONG_ARGUMENTS
    else:
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "torch-ucx-rpc" in done.stdout + done.stderr or "--version" in arguments


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_a_terminal_of_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRON, "COLUMNS", "80")
    usage, _, explanation = torch_ucx_rpc(name, "--help").stdout.partition("\n\n")
    assert usage.startswith("usage:")
    assert [line for line in explanation.splitlines() if len(line) > 80] == []


def test_help_lists_all_commands_and_each_has_a_module() -> None:
    done = torch_ucx_rpc("--help")
    for name in NAMES:
        assert re.search(rf"^ +{name} +\S", done.stdout, re.MULTILINE)
        assert (ROOT / "torch_ucx_rpc" / "_cli" / f"{name}.py").exists()


def test_the_module_is_the_same_program_under_its_own_name() -> None:
    command = [sys.executable, "-m", "torch_ucx_rpc"]
    for arguments in (["--help"], ["top", "--help"]):
        done = subprocess.run([*command, *arguments], env=ENVIRON, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("usage: python -m torch_ucx_rpc ")
        # The name is longer, so lines break elsewhere.
        words = done.stdout.replace("python -m torch_ucx_rpc", "torch-ucx-rpc").split()
        assert words == torch_ucx_rpc(*arguments).stdout.split()


def test_info_explains_an_import_that_fails_under_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")
    monkeypatch.setitem(ENVIRON, "PYTHONPATH", f"{tmp_path}{os.pathsep}{ENVIRON['PYTHONPATH']}")
    done = torch_ucx_rpc("info")
    assert done.returncode == ExitCode.BROKEN
    assert "PROBLEM  torch cannot be imported: libtorch_cpu.so" in done.stdout


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_has_gone_ends_info_without_a_traceback(options: list[str]) -> None:
    command = [sys.executable, "-m", "torch_ucx_rpc", "info", *options]
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == ExitCode.BROKEN


@pytest.mark.parametrize("closed", ["1", "2", "1 2", "0 1 2"])
@pytest.mark.parametrize("arguments", ["info --json", "run -n 1 -c pass"])
def test_commands_run_without_the_standard_streams(arguments: str, closed: str) -> None:
    code = f"""
import os, sys
for number in map(int, {closed.split()}):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "torch_ucx_rpc", *{arguments.split()}])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRON, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- Wrong arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        *(f"run {option} {value}" for option in ("-n", "--nproc", "--nnodes") for value in ("two", "-1", "0", "1.5")),
        *(f"run --max-restarts {value}" for value in ("two", "-1", "1.5")),
        "run --node-rank x",
        "run --role x",
        "run --rdzv x",
        "run --nonsense",
        "info --nonsense",
        "check -n x",
        "check --timeout x",
        "top --pid x",
        "top --interval x",
        "nonsense",
        "",
    ],
)
def test_errors_name_the_argument_and_nothing_private(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == ExitCode.WRONG_ARGUMENTS
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"error: (argument |unrecognized arguments: --nonsense|the following arguments .*COMMAND)", error)
    assert not re.search(r"\b_\w|<|object at", error)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def test_commands_print_json_to_stdout_and_the_rest_to_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    # UCX warns of the unknown device eth77 in its log, on stdout.
    monkeypatch.setitem(ENVIRON, "UCX_NET_DEVICES", "eth77,lo")
    monkeypatch.setitem(ENVIRON, "UCX_LOG_LEVEL", "info")
    for arguments in (["info", "--json"], ["check", "--json"]):
        done = torch_ucx_rpc(*arguments)
        assert isinstance(json.loads(done.stdout), dict)
    # Workers in other processes write their log to stdout too.
    assert "UCX" in done.stderr
    # No process can have this pid. Pid 1 may be a worker's own, in a container with the host's network.
    nobody = Path("/proc/sys/kernel/pid_max").read_text().strip()
    done = torch_ucx_rpc("top", "--once", "--json", "--pid", nobody)
    assert (done.returncode, done.stdout) == (ExitCode.NO_JOB, "")
    assert done.stderr.startswith("top: no worker of this user")


def test_output_of_c_code_stays_out_of_the_json() -> None:
    code = """
import ctypes, os, sys
import _torch_ucx_rpc_cli as cli
with cli._stdout_of_python_alone():
    ctypes.CDLL(None).puts(b"of C")
    os.write(1, b"of a descriptor\\n")
    print("of Python")
print("afterwards")
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRON, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["of Python", "afterwards", ""]
    assert sorted(done.stderr.splitlines()) == ["of C", "of a descriptor"]


# ---- Exit codes ------------------------------------------------------------------------------------------------------


def test_exit_codes_are_distinct_and_the_page_has_them_all() -> None:
    # In an enum, two names of one code would be one member.
    assert len(ExitCode) == len(ExitCode.__members__)
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    table = page[page.index("## Exit codes") :]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == sorted(ExitCode)


def test_the_page_has_all_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"## `{name}`" in page
        with pytest.raises(SystemExit):
            main([name, "--help"])
        section = page[page.index(f"## `{name}`") :].partition("\n## ")[0]
        options = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", capsys.readouterr().out)) - {"-h", "--help"}
        # Options of the started program, and of `python -m torch_ucx_rpc`.
        options -= {"--epochs"} if name == "run" else {"-m"}
        assert options <= set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", section)), name


def test_main_without_arguments_uses_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torch-ucx-rpc", "--version"])
    with pytest.raises(SystemExit) as ended:
        _torch_ucx_rpc_cli.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("torch_ucx_rpc ")
