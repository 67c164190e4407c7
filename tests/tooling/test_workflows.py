"""The workflows of GitHub call the project's own targets of make, and release what setup.cfg promises."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ._tools import ROOT, SETUP_CFG

WORKFLOWS = ROOT / ".github" / "workflows"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def read(name: str) -> dict[str, Any]:
    workflow = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    # YAML 1.1 reads the key "on" as true.
    workflow["on"] = workflow.pop(True)
    return workflow


CI = read("ci.yml")
NIGHTLY = read("nightly.yml")
RELEASE = read("release.yml")


def scripts(workflow: dict[str, Any]) -> Iterator[str]:
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            if "run" in step:
                yield step["run"]


# The lines of the recipe of each target.
RECIPES = dict(re.findall(r"^([a-z-]+):(?!=).*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE))


def verbs() -> set[str]:
    return set(RECIPES)


def test_workflows_call_existing_targets_and_files() -> None:
    assert [script for script in scripts(CI) if ".ci/run" in script] == [".ci/run"]
    assert set(CI["on"]) == {"push", "pull_request"}
    assert "${{ matrix.command }}" in scripts(NIGHTLY)
    checks = NIGHTLY["jobs"]["checks"]["strategy"]["matrix"]["include"]
    assert [check["command"] for check in checks] == ["make nightly", "tools/mutants.sh"]


def test_ci_and_nightly_run_every_target_that_tests() -> None:
    ci = set(re.findall(r"^stage .*\bmake ([a-z-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE))
    parts_of_test = {"test-light-cpp", "test-python"}
    tests = {verb for verb in verbs() if verb.partition("-")[0] == "test"}
    assert tests - parts_of_test == (ci & tests) | {"test-field"}
    assert ci <= verbs()
    for check in ("test-field", "tools/sanitize.sh", "tools/soak.sh", "tools/fuzz.sh"):
        assert f"{check} " in RECIPES["nightly"]


def test_container_builds_wheels_for_each_python_of_setup_cfg() -> None:
    job = RELEASE["jobs"]["wheels"]
    assert "manylinux_2_28_x86_64" in job["container"]
    promised = re.findall(r"Python :: (3\.\d+)$", SETUP_CFG["metadata"]["classifiers"], re.MULTILINE)
    assert job["strategy"]["matrix"]["python"] == promised


@pytest.mark.parametrize("workflow", [CI, NIGHTLY, RELEASE], ids=["ci", "nightly", "release"])
def test_scripts_are_bash_and_their_targets_exist(workflow: dict[str, Any]) -> None:
    for script in scripts(workflow):
        # Expressions that GitHub replaces before the shell sees them, such as a target.
        text = re.sub(r"\$\{\{.*?\}\}", "build", script)
        subprocess.run(["bash", "-n", "-c", text], check=True)
        assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= verbs()
        for file in re.findall(r"\b(?:tools|tests)/[\w/.]+", text):
            assert (ROOT / file).exists()


def test_the_tag_has_to_be_the_version() -> None:
    [check] = (script for script in scripts(RELEASE) if script.startswith("test "))
    for tag, code in ((f"v{SETUP_CFG['metadata']['version']}", 0), ("v0.0.0", 1)):
        done = subprocess.run(["bash", "-c", check], cwd=ROOT, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"})
        assert done.returncode == code


@pytest.mark.parametrize("script", sorted((ROOT / "tools").glob("*.sh")), ids=lambda script: script.name)
def test_a_tool_explains_itself(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", script], check=True)
    if text.startswith("#!"):
        told = subprocess.run([script, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
        assert script.name in told, "the comment at its beginning says how to call it"
