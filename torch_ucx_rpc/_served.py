"""What a worker serves by name, for its statistics; without importing the services where they are not used."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any


@dataclasses.dataclass(frozen=True)
class ServiceStatistics:
    """What a worker has served under a name since it was registered.

    Attributes:
        name (str), group (str | None): of the service.
        replicas (tuple[str, ...]): all workers that offer it, as far as this one knows, by rank.
        calls (int): that have begun here.
        errors (int): of those, the ones that have raised.
        open (int): of those, the ones that go on.
    """

    name: str
    group: str | None
    replicas: tuple[str, ...]
    calls: int
    errors: int
    open: int

    @classmethod
    def from_values(cls, values: Any) -> ServiceStatistics:
        """Of what ``dataclasses.asdict`` and JSON have made of one; TypeError for anything else."""
        return cls(**{**values, "replicas": tuple(values["replicas"])})


def services_of(agent: Any) -> tuple[ServiceStatistics, ...]:
    """What the worker of this agent serves, by name."""
    services = sys.modules.get("torch_ucx_rpc.services._api")
    return () if services is None else services.statistics_of(agent)
