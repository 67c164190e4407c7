"""`native_op`: operators of torch that are written in Python and run without the GIL.

* ``op``          `native_op`, which checks the schema and defines the operator
* ``numba_code``  compiles the function with numba; imported with the first operator
"""
