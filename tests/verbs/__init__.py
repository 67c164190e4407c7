"""Two emulated machines with Soft-RoCE between them: the project over verbs, without an InfiniBand card.

``tools/verbs.sh`` runs it; as root, since it makes the machines' disk. Each machine has a Linux of its own with
``rdma_rxe``, Debian's UCX, which has verbs, and nothing but a cable to the other one.

* ``__main__``     from the arguments to the report
* ``_image``       the disk that both machines boot from: Debian, torch, this project
* ``_machines``    the machines as processes of QEMU: booted, told what to run, paused, switched off
* ``_workers``     the two workers of a trial, one on each machine, and their facts
* ``_trials``      the trials and their required outcomes
* ``guest``        scripts that run in a machine before its first command
* ``programs``     the programs of the workers
"""
