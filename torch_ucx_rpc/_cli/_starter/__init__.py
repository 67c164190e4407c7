"""Starts the workers of ``run`` on this machine, by fork from a process that has imported torch, or by exec.

* ``client``         the launcher's side: `Starter`, and `Worker`, a started process
* ``sitecustomize``  the process that starts workers: the starter
* ``reasons``        the signs by which a worker could notice a fork

The starter is ``python <program>`` itself, in the environment of the workers. ``PYTHONPATH`` makes Python import this
folder's ``sitecustomize`` at Python's start, before Python looks at the program. There the starter imports torch and
serves the launcher. In a forked worker that import returns, and Python goes on to run the program. So ``sys.argv``,
``__main__``, tracebacks and exit codes are those of plain Python. For workers by exec the starter is a bare Python that
forks and calls ``execve``.

Invariants:

* A worker is a child of the launcher, leads a session, and has no file of the starter.
* The launcher alone knows, signals and awaits its workers. The starter keeps no list.
* The starter has one thread, and its imports have left no file open. It refuses to fork otherwise, and says why.
* The program runs in workers only. If anything fails in the starter, it ends; it never goes on to the program.

The starter forks a helper ahead of each batch of workers, and the helper forks the workers. Messages are lines of JSON
on a socket pair. The launcher sends one, and reads the answer before it sends another. A request for a worker carries
its stdout and stderr as files::

    launcher               answer
                           {"reason": null}                 the helper waits; or why no worker can be forked here
    {"environ": {...}}     {"pid": 42} or {"errno": 11}     by the helper, once for each worker
    {"do": "end"}          {"ended": true}                  the workers lead sessions, and are children of the launcher

The helper ends after its batch. The launcher is a child subreaper until then, so it inherits the workers.

Deaths:

* A worker: the starter need not know.
* The starter: workers go on. The next batch starts another starter.
* The helper: the starter ends too. The launcher reads the end of the socket, and ends the workers that it knows.
* The launcher: the kernel kills its workers and the starter (PR_SET_PDEATHSIG), and the helper reads the end of the
  socket. A worker that the launcher has not inherited yet sees another parent, and ends.
"""
