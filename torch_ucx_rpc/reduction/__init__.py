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

How the package is laid out, from the bottom up; the way of one push goes from ``_pushes`` to ``_host`` and down:

* ``_messages``       what trainers and hosts tell each other
* ``_roster``         the trainers of a server, as a host knows them
* ``_results``        the last results, for the others when a host is lost
* ``_round``          the tensors of one round of a piece, and their sum
* ``_piece``          a piece: its rounds, and what late trainers have missed
* ``_applied``        the pushes that an asynchronous server has applied
* ``_parameters``     a piece of a server with an optimizer; checkpoint and replica
* ``_host``           what a host does
* ``_hosts``          the hosts on this worker, and what trainers ask of them
* ``_loopback``       pushes of a trainer to its own host
* ``_plan``           how work is spread over hosts
* ``_meeting``        how trainers become hosts
* ``_ring``           the hosts of a server, as one trainer calls them
* ``_server``         `Server`: a trainer's view of it: its models, and its positions
* ``_pushes``         pushes that outlive hosts
* ``_servers``        the servers that this worker uses, by name
* ``_serve``          `serve`
* ``_push_pull``      `push_pull`
* ``_ddp``            `state` and `hook`
* ``_buckets``        gradients that travel together
* ``_asking``         trainers that wait for another one's model
* ``_copy``           a trainer's copy of a model, got from another one and given to others
* ``_data_parallel``  `DataParallel`
"""

from torch_ucx_rpc.reduction._data_parallel import DataParallel
from torch_ucx_rpc.reduction._ddp import State, hook, state
from torch_ucx_rpc.reduction._push_pull import push_pull, push_pull_async
from torch_ucx_rpc.reduction._serve import serve
from torch_ucx_rpc.reduction._server import Server

__all__ = ["DataParallel", "Server", "State", "hook", "push_pull", "push_pull_async", "serve", "state"]
