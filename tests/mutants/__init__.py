"""Whether the tests notice bugs: each is put into a copy of the sources, and the tests that it names must fail.

``tools/mutants.sh`` tries all, and ``tools/mutants.sh NAME ...`` some.

* ``__main__``       from the arguments to the report
* ``_copy``          the copy: what is in it, how it is built, and how a test runs there
* ``_mutant``        what a mutant is, and where its text stands
* ``_tests``         where a test is, by its name
* ``_list``          the mutants, and when the list takes another one
"""
