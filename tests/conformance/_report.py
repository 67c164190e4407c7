"""The results of all tests as data, for the page that compares the backends."""

from __future__ import annotations

import collections
import json
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import pytest


class Report:
    """A pytest plugin that writes a JSON file when the run is over.

    Under pytest-xdist it belongs in the process that distributes the tests, which gets all results (``is_needed``).
    """

    @staticmethod
    def is_needed(config: pytest.Config) -> bool:
        """Whether a report is wanted, and this process writes it."""
        return bool(config.getoption("--conformance-report")) and not hasattr(config, "workerinput")

    def __init__(self, config: pytest.Config) -> None:
        self._file: Path = config.getoption("--conformance-report")
        self._backend: str = config.getoption("--rpc-backend")
        self._are_gpus_used: bool = config.getoption("--cuda")
        self._started = time.time()
        # suite -> test -> its result, and the reason in a few words.
        self._outcomes: dict[str, dict[str, tuple[str, str]]] = collections.defaultdict(dict)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self._expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite, test = self._names(report.nodeid)
        earlier, _ = self._outcomes[suite].get(test, ("not run", ""))
        # A failed setup or teardown counts, and so does a dead process of xdist.
        if earlier != "failed" and (report.when == "call" or not report.passed):
            self._outcomes[suite][test] = (report.outcome, _reason(report))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._content(exitstatus), indent=1) + "\n", encoding="utf-8")

    def _expect(self, nodeids: Iterable[str]) -> None:
        for nodeid in nodeids:
            suite, test = self._names(nodeid)
            self._outcomes[suite].setdefault(test, ("not run", ""))

    def _names(self, nodeid: str) -> tuple[str, str]:
        """Return the names of the suite, as torch calls it, and of the test."""
        *_, suite, test = nodeid.split("::")
        return suite.removeprefix(self._backend), test

    def _content(self, exitstatus: int) -> dict[str, object]:
        import torch  # here, since xdist's workers import this module but write nothing

        return {
            "configuration": {
                "backend": self._backend,
                "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")},
                "cores": len(os.sched_getaffinity(0)),
                "gpus": torch.cuda.device_count() if self._are_gpus_used else 0,
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
