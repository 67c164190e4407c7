"""How each test fared, as data: for the page that sets the backends side by side."""

from __future__ import annotations

import collections
import json
import os
import platform
import time
from pathlib import Path

import pytest
import torch


class Report:
    """A pytest plugin that writes a JSON file when the run is over."""

    def __init__(self, config: pytest.Config) -> None:
        self._file: Path = config.getoption("--conformance-report")
        self._backend: str = config.getoption("--rpc-backend")
        self._gpus = torch.cuda.device_count() if config.getoption("--cuda") else 0
        self._started = time.time()
        # Suite -> test -> how it ended, and in a few words why.
        self._outcomes: dict[str, dict[str, tuple[str, str]]] = collections.defaultdict(dict)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            suite, test = self._names(item.nodeid)
            self._outcomes[suite][test] = ("not run", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Setting up and clearing away count when they are what went wrong.
        if report.when == "call" or not report.passed:
            suite, test = self._names(report.nodeid)
            if self._outcomes[suite][test][0] != "failed":
                self._outcomes[suite][test] = (report.outcome, _reason(report))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._content(exitstatus), indent=1) + "\n", encoding="utf-8")

    def _names(self, nodeid: str) -> tuple[str, str]:
        """Of the suite, as torch calls it, and of the test."""
        *_, suite, test = nodeid.split("::")
        return suite.removeprefix(self._backend), test

    def _content(self, exitstatus: int) -> dict[str, object]:
        return {
            "configuration": {
                "backend": self._backend,
                "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")},
                "cores": len(os.sched_getaffinity(0)),
                "gpus": self._gpus,
            },
            "versions": {"torch": torch.__version__, "python": platform.python_version(), **self._ucx_version()},
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "seconds": round(time.time() - self._started),
            "complete": exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
            "outcomes": self._outcomes,
        }

    def _ucx_version(self) -> dict[str, str]:
        if self._backend != "UCX":
            return {}
        import torch_ucx_rpc

        return {"torch_ucx_rpc": torch_ucx_rpc.__version__, "ucx": torch_ucx_rpc._C.ucx_library()["version"]}


def _reason(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        *_, text = report.longrepr
        return text.removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).splitlines()[0]
