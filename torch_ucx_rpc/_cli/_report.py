"""`Report`: the findings of ``info``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from torch_ucx_rpc._bootstrap.site_settings import Problem


@dataclasses.dataclass
class Report:
    """Facts by section and name, and the problems among them."""

    facts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def add(self, section: str, **facts: Any) -> None:
        self.facts.setdefault(section, {}).update(facts)

    def complain(self, problem: str, cure: str, *, is_fatal: bool = False) -> None:
        self.problems.append(Problem(problem, cure, is_fatal))


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
