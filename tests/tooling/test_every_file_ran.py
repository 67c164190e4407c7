"""tools/every_file_ran.py finds a test file that did not run, by the reports that pytest and ctest write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import every_file_ran  # noqa: E402  (found through the line above)

RUNS = "def test_a(): pass\n"
SKIPS = "import pytest\ndef test_a(): pytest.skip('not installed: srun')\n"
SKIPPED_AS_A_WHOLE = "import pytest\npytest.importorskip('no_such_module')\n"
CLASS = "class TestA:\n    def test_a(self): assert False\n"
BROKEN = "import no_such_module\n"


def run_pytest(root: Path, path: str) -> Path:
    """The report of a run in ``root``, which has no settings of this repository."""
    report = root / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(root)]
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", "--junit-xml", str(report)]
    subprocess.run([*command, *plugins, path], cwd=root, capture_output=True, check=False)
    return report


@pytest.mark.parametrize(
    ("text", "is_missing"),
    [(RUNS, False), (CLASS, False), (SKIPS, True), (SKIPPED_AS_A_WHOLE, True), (BROKEN, True), ("", True)],
    ids=["passes", "fails in a class", "skips", "skips as a whole", "cannot be imported", "has no test"],
)
def test_file_without_a_test_that_ran_is_missing(tmp_path: Path, text: str, is_missing: bool) -> None:
    for name, content in {"a": RUNS, "b": text}.items():
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(content)
    missing = every_file_ran.missing(tmp_path, [run_pytest(tmp_path, "tests")])
    assert ("tests/b/test_b.py" in missing) == is_missing


def test_file_that_no_run_collected_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("a", "b"):
        (tmp_path / "tests" / f"test_{name}.py").write_text(RUNS)
    assert every_file_ran.missing(tmp_path, [run_pytest(tmp_path, "tests/test_a.py")]) == ["tests/test_b.py"]


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
