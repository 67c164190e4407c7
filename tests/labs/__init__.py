"""What a cluster has and one machine has not, for tests that run as root on Linux.

* ``VirtualHosts(["a", "b"])``: hosts with a network, shared memory and processes of their own, on one switch, with
  cables that can be cut. (``_virtual_hosts``)
* ``SlurmCluster(hosts)``: Slurm on them. (``_slurm``)
* ``needs("srun", "mpirun.mpich")`` and ``needs_virtual_hosts()``: a test is skipped where that is not to be had; where
  CI is set it fails. (``_needs``)
"""

from ._needs import needs, needs_virtual_hosts
from ._slurm import SlurmCluster
from ._virtual_hosts import VirtualHost, VirtualHosts

__all__ = ["SlurmCluster", "VirtualHost", "VirtualHosts", "needs", "needs_virtual_hosts"]
