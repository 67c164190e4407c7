"""Check that the tests notice bugs: each mutant puts a bug into a copy of the sources, and the tests that it names must
fail.

``tools/mutants.sh`` tries all mutants, ``tools/mutants.sh NAME ...`` some.

* ``__main__``       from the arguments to the report
* ``_copy``          the copy, its build, and its tests
* ``_mutant``        a mutant, and the place of its text
* ``_tests``         the place of a test, by its name
* ``_list``          the mutants, and the rule for adding one
"""
