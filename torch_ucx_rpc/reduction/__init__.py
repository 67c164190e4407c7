"""Averages of gradients through servers instead of c10d's collectives: trainers may come, go, be slow, or die.

::

    from torch_ucx_rpc import reduction

    server = reduction.serve("ps0", "ps1")                   # in every trainer; without names, trainers are hosts
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(reduction.state(server), reduction.hook)

    model = reduction.DataParallel(model, server)            # or without a process group
    means = reduction.push_pull(server, gradients)           # or by hand, also with the optimizer on the server

A step is a transaction. Its trainers put their gradients into slots of the hosts, and get the means. They apply the
means when the decider of the epoch has closed the step. docs/development/reduction.md has the protocol. From the bottom
up:

* ``_messages``       messages between trainers, hosts and the decider
* ``_ledger``         the steps of a model, as state machines without threads and network
* ``_plan``           how work is spread over hosts
* ``_host``           work of a host: sums; parameters, their optimizer and checkpoints
* ``_decider``        the decider of an epoch: the ledgers of all models
* ``_office``         this worker among the others: epochs and messages
* ``_steps``          one model of this trainer
* ``_server``         `serve` and `Server`
* ``_push_pull``      `push_pull`
* ``_copy``           the state of a model, for transfer between trainers
* ``_ddp``            `state` and `hook`
* ``_data_parallel``  `DataParallel`
"""

from torch_ucx_rpc.reduction._data_parallel import DataParallel
from torch_ucx_rpc.reduction._ddp import State, hook, state
from torch_ucx_rpc.reduction._push_pull import push_pull, push_pull_async
from torch_ucx_rpc.reduction._server import Server, serve
from torch_ucx_rpc.reduction._steps import Contributors

__all__ = ["Contributors", "DataParallel", "Server", "State", "hook", "push_pull", "push_pull_async", "serve", "state"]
