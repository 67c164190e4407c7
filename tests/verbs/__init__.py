"""Two emulated machines with Soft-RoCE between them: the project over verbs, without an InfiniBand card.

``tools/verbs.sh`` runs it. It needs root to make the machines' disk. Each machine has its own Linux with ``rdma_rxe``,
Debian's UCX, which has verbs, and a cable to the other machine only.

* ``__main__``     from the arguments to the report
* ``_image``       the disk that both machines boot from: Debian, torch, this project
* ``_machines``    the machines as QEMU processes: boot them, run commands, pause them, switch them off
* ``_workers``     the two workers of a trial, one on each machine, and their facts
* ``_trials``      the trials and their required outcomes
* ``guest``        scripts that run in a machine before its first command
* ``programs``     the programs of the workers
"""
