"""`torch_ucx_rpc.init_rpc`: starting a worker with the variables of its launcher.

* ``init``         `init_rpc`
* ``environment``  reads the variables of launchers: torchrun, mpirun, srun
* ``hydra``        names a job of MPICH's mpirun on one host, where no variable does
* ``mpi``          asks MPI for the host of rank 0, where no variable names it
"""
