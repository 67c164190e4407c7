"""Reports of tests/conformance/_report.py, under pytest-xdist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
    from tests.conformance._report import Report
    from pathlib import Path

    def pytest_addoption(parser):
        parser.addoption("--conformance-report", type=Path)
        parser.addoption("--rpc-backend", default="TENSORPIPE")
        parser.addoption("--cuda", action="store_true")

    def pytest_configure(config):
        if Report.is_needed(config):
            config.pluginmanager.register(Report(config))
"""

SUITE = """
    import os, signal, unittest
    import pytest

    class TENSORPIPESmallTest(unittest.TestCase):
        def test_passes(self):
            pass

        def test_fails(self):
            self.assertEqual(1, 2)

        @unittest.skip("for a reason")
        def test_is_skipped(self):
            pass

        def test_ends_its_process(self):
            os.kill(os.getpid(), signal.SIGKILL)

    class TENSORPIPEOtherTest(unittest.TestCase):
        def test_passes(self):
            pass
"""


def test_every_outcome_is_in_the_report(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(_dedented(CONFTEST))
    (tmp_path / "test_small.py").write_text(_dedented(SUITE))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    report = tmp_path / "report.json"
    options = ["-q", "-n2", "-p", "no:cacheprovider", f"--conformance-report={report}", "test_small.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        # This test may itself run in a process of pytest-xdist.
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")},
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    written = json.loads(report.read_text())
    assert written["complete"]
    outcomes = {
        f"{suite}.{test}": how for suite, tests in written["outcomes"].items() for test, (how, _) in tests.items()
    }
    assert outcomes == {
        "SmallTest.test_passes": "passed",
        "SmallTest.test_fails": "failed",
        "SmallTest.test_is_skipped": "skipped",
        "SmallTest.test_ends_its_process": "failed",
        "OtherTest.test_passes": "passed",
    }
    assert "1 != 2" in written["outcomes"]["SmallTest"]["test_fails"][1]


def _dedented(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())
