"""Whether the tests notice bugs: bugs are put into a copy of the sources, one by one, and their tests must fail.

``make mutants`` runs it, and a list of names runs a few: ``python -m tests.mutants NAME ...``. Each test
that a promise names stands in one of the lists, or in ``promises.UNTRIED`` with a reason; ``test_promises.py`` checks
that.

* ``__main__``       from the arguments to the report
* ``_copy``          the copy: what is in it, how it is built, and how a test runs there
* ``_mutant``        what a mutant is, and where its text stands
* ``_tests``         where a test is, by its name
* ``_all``           the lists below, together
* ``losses``         how the end of a worker is noticed, and what outlives it
* ``calls``          deadlines, threads, tensors, the receive window, references
* ``ends``           shutdowns
* ``resources``      memory, files, shared memory
* ``processes``      starts, forks, signals, MPI, settings of the site
* ``libraries``      services, reduction, checkpoints
* ``proofs``         the programs that judge: benchmarks, soak, verbs, checks of reports
"""
