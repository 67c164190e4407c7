"""One-way tensors between workers: a value goes from one worker to a tag on another, and waits there to be taken.

A channel is faster than a call: it runs no function at the receiver, wakes only a thread that waits for the value, and
pickles nothing. A large value goes straight into tensors that the receiver has posted. Pipelines, parameter servers and
rings use channels. On other backends than UCX a value travels in a call.

* `Channel`: the values of one group of workers, in one epoch at a time
* `Sent`: a value on its way
* `Posted`: a value that this worker expects

Example::

    >>> channel = Channel("ring")               # on every worker of the ring
    >>> channel.put("w1", "step 7", gradient)   # on w0
    >>> channel.take("w0", "step 7")            # on w1
    tensor([...])

A worker that has advanced to epoch 4 drops the values of epoch 3, and their senders get `EpochEnded`.
Values of a later epoch wait until the receiver advances to it.

How the package is laid out:

* ``_channel``    the public classes
* ``_rpc_slots``  values carried by calls, for other backends than UCX
"""

from torch_ucx_rpc.channel._channel import Channel, Posted, Sent

__all__ = ["Channel", "Posted", "Sent"]
