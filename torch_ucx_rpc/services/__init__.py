"""Names for what workers offer to each other: functions that any worker calls by name, values, groups, and roles.

::

    from torch_ucx_rpc import services

    services.register("score", model.score, idempotent=True)    # on several workers: replicas
    services.pair("weights", tensor)                            # a value
    y = services.call("score", x)                               # on any worker: the least loaded living replica
    rref = services.get("weights")
    futures = services.call_role("trainer", load, args=(7,))    # every worker whose role that is

Every worker has the whole table of names: registering tells all, a lookup is that of a dict, a call is one request.
Names are unique by the decision of the living worker with the lowest rank; names of the dead go when the agent sees
their end. Any backend of ``torch.distributed.rpc`` will do; docs/services.md says what is different on TensorPipe.

How the package is laid out:

* ``_table``      what one worker knows of the names, without a network
* ``_directory``  how the workers' tables are kept alike; the argument for it stands there
* ``_deciding``   what a worker does as the decider on names
* ``_announcing`` how a worker tells the others of its changes
* ``_served``     what this worker serves: the callee's side
* ``_calls``      `call` and `call_async`: the caller's side
* ``_offered``    `Service`: a name and who offers it
* ``_watching``   `watch`
* ``_api``        everything else that is public
* ``_errors``     the exceptions
"""

from torch_ucx_rpc._observe.statistics import ServiceStatistics
from torch_ucx_rpc.services._api import (
    Member,
    call_group,
    call_role,
    get,
    join,
    leave,
    members,
    names,
    pair,
    register,
    register_all,
    statistics,
    take_role,
    unregister,
)
from torch_ucx_rpc.services._calls import call, call_async
from torch_ucx_rpc.services._errors import NameContested, NameTaken, NotAMember, NotServed, ReplicasLost, UnknownName
from torch_ucx_rpc.services._offered import Service
from torch_ucx_rpc.services._watching import watch

__all__ = [
    "Member",
    "NameContested",
    "NameTaken",
    "NotAMember",
    "NotServed",
    "ReplicasLost",
    "Service",
    "ServiceStatistics",
    "UnknownName",
    "call",
    "call_async",
    "call_group",
    "call_role",
    "get",
    "join",
    "leave",
    "members",
    "names",
    "pair",
    "register",
    "register_all",
    "statistics",
    "take_role",
    "unregister",
    "watch",
]
