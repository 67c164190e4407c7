"""Names for values and for functions that any worker can call, and calls to all workers of a role.

::

    from torch_ucx_rpc import services

    services.register("score", model.score, idempotent=True)    # on several workers: replicas
    services.pair("weights", tensor)                            # a value
    services.wait_for("score", replicas=2)                      # on any worker
    y = services.call("score", x)                               # the least loaded living replica
    rref = services.get("weights")
    futures = services.call_role("trainer", load, args=(7,))    # every worker of the role

One worker decides on names, and each worker has a copy of the table. So a call of a known name is one request. Services
work on any backend of ``torch.distributed.rpc``; docs/services.md describes the differences on TensorPipe.

`statistics` always returns. The other functions raise NotRunning (of ``torch_ucx_rpc.errors``) before ``init_rpc``, and
RuntimeError if they ask the deciding worker and no worker decides for ``rpc_timeout`` (60 s if that is 0). `call` and
`call_async` ask it only about a name that this worker does not know.

How the package is laid out:

* ``_table``      the names on one worker, without a network
* ``_directory``  the decider's table and its copies, while workers join, hang and die
* ``_served``     this worker's services: the callee's side
* ``_calls``      `call` and `call_async`: the caller's side
* ``_api``        all other public functions
* ``_errors``     the exceptions
"""

from torch_ucx_rpc._observe.statistics import ServiceStatistics
from torch_ucx_rpc.services._api import (
    Member,
    call_role,
    get,
    members,
    names,
    pair,
    register,
    register_all,
    statistics,
    unregister,
    wait_for,
    watch,
)
from torch_ucx_rpc.services._calls import call, call_async
from torch_ucx_rpc.services._errors import NameTaken, NotServed, ReplicasLost, UnknownName
from torch_ucx_rpc.services._table import Service

__all__ = [
    "Member",
    "NameTaken",
    "NotServed",
    "ReplicasLost",
    "Service",
    "ServiceStatistics",
    "UnknownName",
    "call",
    "call_async",
    "call_role",
    "get",
    "members",
    "names",
    "pair",
    "register",
    "register_all",
    "statistics",
    "unregister",
    "wait_for",
    "watch",
]
