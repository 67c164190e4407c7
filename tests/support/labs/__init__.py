"""A cluster on one machine, for tests that run as root on Linux.

* ``VirtualHosts(["a", "b"])``: hosts with their own network, shared memory and processes, on one switch, with cables
  that can be cut. (``_virtual_hosts``)
* ``move_to_host(pid)`` moves the calling process onto a host; ``run_workers(..., hosts=hosts)`` uses it. (``_moving``)
* ``Fate(hosts)`` cuts and heals them on a worker's order. (``_fate``)
* ``SlurmCluster(hosts)``: Slurm on these hosts. (``_slurm``)
* ``Container(ipc="host", user=12345).command([...])``: a command in a container like Docker's and Kubernetes's, with
  ``limits(memory_mib=..., cpus=...)``. (``_containers``)
* ``needs("srun", "mpirun.mpich")``, ``needs_mpi4py("mpich")`` and ``needs_virtual_hosts()``: without these the test is
  skipped, or fails if CI is set. (``_needs``)
"""

from ._containers import Container, limits
from ._fate import Fate
from ._moving import move_to_host
from ._needs import needs, needs_mpi4py, needs_virtual_hosts
from ._slurm import SlurmCluster
from ._virtual_hosts import VirtualHost, VirtualHosts

__all__ = [
    "Container",
    "Fate",
    "SlurmCluster",
    "VirtualHost",
    "VirtualHosts",
    "limits",
    "move_to_host",
    "needs",
    "needs_mpi4py",
    "needs_virtual_hosts",
]
