"""Programs that measure other libraries. ``python -m benchmarks.peers NAME`` runs one, and ``others.py`` runs all.

* ``measuring``    the common measurements: echoes of a NumPy array, and many at once
* ``grpc_echo``    gRPC, pickled, over a Unix socket or TCP
* ``ucxx_echo``    UCXX's active messages
* ``mpi_echo``     mpi4py: Send and Recv, Isend and Irecv, or pickled
* ``gloo_echo``    torch.distributed's send and recv, isend and irecv, on Gloo
* ``ray_echo``     an actor of Ray
* ``monarch_echo`` an actor of Monarch

They do not import torch_ucx_rpc: they may run in another Python, since UCXX needs an older UCX.
"""
