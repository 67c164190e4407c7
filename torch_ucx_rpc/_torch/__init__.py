"""All that this package changes in torch, and how Python values travel through torch's RPC pickler.

* ``patches``     `register`: every patch of torch, in one function
* ``barrier``     torch's barrier at the end, which does not wait for the dead
* ``replace``     `replace_tensorpipe`, and the environment variable for it
* ``exceptions``  keeps the type of what a callee raises
* ``sparse``      pickles compressed sparse tensors
* ``arrays``      sends arrays of NumPy, CuPy, numba and RMM as tensors
"""
