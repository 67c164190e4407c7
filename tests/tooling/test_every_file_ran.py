"""tools/every_file_ran.py finds a test file that did not run, from the reports of pytest and ctest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ._tools import ROOT, tool

every_file_ran = tool("every_file_ran")

FILES = {
    "test_runs.py": "def test_a(): pass\n",
    "test_fails.py": "class TestA:\n    def test_a(self): assert False\n",
    "test_skips.py": "import pytest\ndef test_a(): pytest.skip('not installed: srun')\n",
    "test_is_skipped.py": "import pytest\npytest.importorskip('no_such_module')\n",
    "test_is_broken.py": "import no_such_module\n",
    "test_is_empty.py": "",
    "other/test_of_no_run.py": "def test_a(): pass\n",
}


def test_file_without_a_test_that_ran_is_missing(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(content)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors", "--ignore=tests/other"]
    subprocess.run([*command, *options, "--junit-xml=r.xml", "tests"], cwd=tmp_path, capture_output=True, check=False)
    missing = every_file_ran.missing(tmp_path, [tmp_path / "r.xml"])
    assert {*missing} == {f"tests/{name}" for name in FILES} - {"tests/test_runs.py", "tests/test_fails.py"}


CTEST = """<testsuite>
  <testcase name="a_test" classname="a_test" status="run"/>
  <testcase name="b_test" classname="b_test" status="notrun"><skipped/></testcase>
</testsuite>"""


def test_cpp_executable_without_a_test_that_ran_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "cpp"
    folder.mkdir(parents=True)
    for name in ("a", "b", "c"):
        (folder / f"{name}_test.cpp").touch()
    (tmp_path / "ctest.xml").write_text(CTEST)
    missing = every_file_ran.missing(tmp_path, [tmp_path / "ctest.xml"])
    assert missing == [f"tests/cpp/{name}_test.cpp" for name in ("b", "c")]


def test_files_that_need_a_gpu_exist() -> None:
    assert all((ROOT / file).exists() for file in every_file_ran.NEED_A_GPU)
