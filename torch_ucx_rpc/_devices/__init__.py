"""Tensors on CUDA devices.

* ``context``  makes CUDA's contexts before UCX starts
* ``maps``     checks that the device maps of all workers fit together, and derives the maps for replies
* ``pool``     chooses the allocator of received tensors: that of torch or of RMM
* ``wait``     `wait`: a future whose data are on devices
"""
