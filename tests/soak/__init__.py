"""An hour of bad luck: workers on virtual hosts call each other in every way, while some are killed, stopped, cut off.

``tools/soak.sh --minutes 30`` runs it; as root, since it makes hosts. The report is in ``build/soak``. Findings end it
with an error.

* ``__main__``     from the arguments to the report
* ``_crew``        the workers as processes: started, killed, told what to do, measured
* ``_chaos``       what is done to them and to their hosts, and when
* ``_worker``      what each of them does, from joining to leaving
* ``_work``        the kinds of calls, each with the answer that it must have
* ``_libraries``    names that workers take from each other, and a server that counts pushes
* ``_payload``     tensors that their receiver can check
* ``_journal``     what a worker writes down as it goes; the dead leave it behind
* ``_judgement``   what of all that must not have happened
* ``_leftovers``   what they leave behind on their hosts
* ``_report``      the same in words and numbers

``serving`` runs after it: servers that wait in ``rpc.shutdown()`` while others die.

``tools/soak.sh --training`` needs no root, and is in ``training``: trainers of one model that are killed and come back.
"""
