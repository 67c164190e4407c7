"""The workflows of GitHub: they call the project's own verbs, and release what setup.cfg promises."""

from __future__ import annotations

import configparser
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def read(name: str) -> dict[str, Any]:
    workflow = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    # YAML 1.1 reads the key "on" as true.
    workflow["on"] = workflow.pop(True)
    return workflow


CI = read("ci.yml")
RELEASE = read("release.yml")


def scripts(workflow: dict[str, Any]) -> Iterator[str]:
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            if "run" in step:
                yield step["run"]


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def test_ci_runs_what_stands_in_the_repository() -> None:
    assert [script for script in scripts(CI) if ".ci/run" in script] == [".ci/run"]
    assert set(CI["on"]) == {"push", "pull_request"}


def test_a_release_is_made_by_a_tag_and_in_order() -> None:
    assert RELEASE["on"] == {"push": {"tags": ["v*"]}}
    jobs = RELEASE["jobs"]
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "sdist": None,
        "wheels": "sdist",
        "test": "wheels",
        "release": ["sdist", "wheels", "test"],
        "site": "release",
    }


def test_only_the_jobs_that_publish_may_write() -> None:
    assert RELEASE["permissions"] == CI["permissions"] == {"contents": "read"}
    writes = {name: job["permissions"] for name, job in RELEASE["jobs"].items() if "permissions" in job}
    assert writes == {"release": {"contents": "write"}, "site": {"id-token": "write", "pages": "write"}}


def test_wheels_are_built_in_the_container_for_each_python_of_setup_cfg(setup_cfg) -> None:
    job = RELEASE["jobs"]["wheels"]
    assert "manylinux_2_28_x86_64" in job["container"]
    promised = re.findall(r"Python :: (3\.\d+)$", setup_cfg["metadata"]["classifiers"], re.MULTILINE)
    assert job["strategy"]["matrix"]["python"] == promised


@pytest.mark.parametrize("workflow", [CI, RELEASE], ids=["ci", "release"])
def test_scripts_are_bash_and_their_verbs_exist(workflow: dict[str, Any]) -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for script in scripts(workflow):
        # What GitHub replaces before the shell sees it.
        text = re.sub(r"\$\{\{.*?\}\}", "replaced", script)
        subprocess.run(["bash", "-n", "-c", text], check=True)
        assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= verbs
        for file in re.findall(r"\b(?:tools|tests)/[\w/.]+", text):
            assert (ROOT / file).exists()


def test_the_tag_has_to_be_the_version(setup_cfg) -> None:
    [check] = (script for script in scripts(RELEASE) if script.startswith("test "))
    for tag, code in ((f"v{setup_cfg['metadata']['version']}", 0), ("v0.0.0", 1)):
        done = subprocess.run(["bash", "-c", check], cwd=ROOT, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"})
        assert done.returncode == code


def test_a_wheel_for_a_newer_glibc_ends_the_release(tmp_path: Path) -> None:
    [check] = (script for script in scripts(RELEASE) if "manylinux_2_28" in script)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "a-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl").touch()
    assert subprocess.run(["bash", "-c", check], cwd=tmp_path).returncode == 0
    (tmp_path / "dist" / "b-1-cp311-cp311-manylinux_2_35_x86_64.whl").touch()
    assert subprocess.run(["bash", "-c", check], cwd=tmp_path).returncode == 1
