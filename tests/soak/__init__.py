"""Workers on virtual hosts call each other in every way, while some are killed, stopped or cut off.

``tools/soak.sh --minutes 30`` runs the soak. It needs root to make hosts. The report is in ``build/soak``. A run with
findings exits with 1.

* ``__main__``     the arguments
* ``_run``         from the start of the workers to the report
* ``_crew``        the workers as processes: started, killed, ordered, measured
* ``_chaos``       the misfortunes of workers and hosts, and their times
* ``_worker``      the life of each worker, from joining to leaving
* ``_work``        the kinds of calls, each with the answer that it must have
* ``_libraries``   names that workers take from each other, and a server that counts pushes
* ``_payload``     tensors that their receiver can check
* ``_journal``     the notes of a worker, which outlive it
* ``_judgement``   the events that must not have happened
* ``_leftovers``   what workers leave in processes and on hosts
* ``_report``      the results in words and numbers

``serving`` runs next: servers wait in ``rpc.shutdown()`` while other workers die.

``tools/soak.sh --resuming`` loses no worker. ``resuming`` has its misfortunes, such as cuts within the limits;
``_proxy`` has a proxy that dies.

``tools/soak.sh --training`` is in ``training``: trainers of one model are killed and restarted. It needs no root.
"""
