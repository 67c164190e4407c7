"""Averages of gradients by way of servers, instead of c10d's collectives: trainers may come, go, be slow, or die.

::

    from torch_ucx_rpc import reduction

    server = reduction.serve("ps0", "ps1")                   # every trainer; without names, the trainers serve
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(reduction.state(server, quorum=3), reduction.hook)

    model = reduction.DataParallel(model, server)            # or without a process group
    means = reduction.push_pull(server, gradients)           # or by hand, also with the optimizer on the server

A trainer sends a bucket of gradients to a host of the server, by one request, and the mean of all trainers' is the
answer. Any backend of ``torch.distributed.rpc`` will do; docs/reduction.md says what is different on TensorPipe.

How the package is laid out:

* ``_host``           what a host does: rounds, sums, replicas; the argument for it stands there
* ``_client``         `serve`, `push_pull`, and pushes that outlive hosts
* ``_ddp``            `state` and `hook`
* ``_data_parallel``  `DataParallel`
* ``_site``           what a process has of all of these while an agent runs
"""

from torch_ucx_rpc.reduction._client import Server, push_pull, push_pull_async, serve
from torch_ucx_rpc.reduction._data_parallel import DataParallel
from torch_ucx_rpc.reduction._ddp import State, hook, state

__all__ = ["DataParallel", "Server", "State", "hook", "push_pull", "push_pull_async", "serve", "state"]
