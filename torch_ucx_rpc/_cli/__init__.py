"""The commands of ``torch-ucx-rpc``; `_torch_ucx_rpc_cli` has their arguments and exit codes.

* ``run``            starts the workers of a job
* ``info``           shows the installation and the machine
* ``check``          lets workers call each other
* ``top``            watches a running job
* ``_job``           the part of a job that is on this machine, for ``run``
* ``_starter``       starts workers by fork or by exec, for ``run``
* ``_starter.client``         the launcher's side of it
* ``_starter.reasons``        the signs by which a worker could notice a fork
* ``_starter.sitecustomize``  the process that starts workers
* ``_children``      ends workers when not all could be started, for ``run``
* ``_signals``       the signals that end a job, for ``run``
* ``_output``        the output of ``run``'s workers
* ``_report``        facts and problems, for ``info``
* ``_ucx_facts``     the section of ``info`` about UCX
* ``_ucx_probe``     asks UCX in a process of its own
* ``_machine_facts`` the section of ``info`` about the machine
* ``_console``       tables, progress and units
"""
