"""The changes of this package to torch, and the path of Python values through torch's RPC pickler.

* ``patches``     `register`: every patch of torch, in one function
* ``shutdown``    parts of a graceful shutdown in which torch would wait for the dead
* ``replace``     `replace_tensorpipe`, and the environment variable for it
* ``exceptions``  keeps the type of an exception that a callee raises
* ``unsent``      releases what a message holds that cannot be pickled, or a call that cannot be sent
* ``sparse``      pickles compressed sparse tensors
* ``subclasses``  refuses tensors of derived classes whose memory is incomplete
* ``arrays``      sends arrays of NumPy, CuPy, numba and RMM as tensors
"""
