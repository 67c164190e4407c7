"""Starts the workers of ``run`` on this machine, by fork from a process that has imported torch, or by exec.

* ``client``         the launcher's side: `Starter`, and `Worker`, a started process
* ``sitecustomize``  the process that starts workers: the starter
* ``reasons``        by what a worker could tell a fork from an exec

The starter is ``python <program>`` itself, in the environment of the workers. ``PYTHONPATH`` makes Python import this
folder's ``sitecustomize`` in its own start, before it looks at the program. There the starter imports torch and serves
the launcher. In a forked worker that import returns, and Python goes on to run the program. So everything that Python
does between its start and the program, and after it, is Python's own: ``sys.argv``, ``__main__``, tracebacks, exit
codes. For workers by exec the starter is a bare Python that forks and calls ``execve``.

Invariants:

* A worker is a child of the launcher, leads a session, and has no file of the starter.
* The launcher alone knows, signals and awaits its workers. The starter keeps no list.
* The starter has one thread, and no file but its socket. It refuses to fork otherwise, and says why.
* The program runs in workers only. If anything fails in the starter, it ends; it never goes on to the program.

Messages are lines of JSON on a socket pair. The launcher sends one, and reads the answer before it sends another. A
request for a worker carries its stdout and stderr as files::

    launcher               answer
                           {"reason": null}                 ready; or why no worker can be forked here
    {"do": "begin"}        {"begun": true}                  the starter has forked a helper, which reads what follows
    {"environ": {...}}     {"pid": 42} or {"errno": 11}     once for each worker
    {"do": "end"}          {"ended": true}                  the workers lead sessions, and are children of the launcher

The kernel hands the orphans of the helper to the launcher, which is a child subreaper between ``begin`` and ``end``.

Deaths:

* A worker: the starter need not know.
* The starter: workers go on. The next ``begin`` starts another starter.
* The helper: the launcher reads ``ended`` where it expects a pid, and ends the workers that it knows.
* The launcher: the kernel kills its workers and the starter (PR_SET_PDEATHSIG). A worker that the launcher has not
  inherited yet sees another parent, and ends.
"""
