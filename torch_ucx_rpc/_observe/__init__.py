"""The reports of a worker on itself while it runs.

* ``statistics``  `statistics`, and the snapshot that it returns
* ``lost``        `on_lost`, a callback for the end of other workers
* ``life``        one life of this worker, and objects of the libraries that last as long
* ``futures``     futures that fail without keeping what their exceptions know
* ``log``         warnings of the agent in Python's logging
* ``prometheus``  serves a snapshot to Prometheus, over HTTP
* ``socket``      serves a snapshot to ``python -m torch_ucx_rpc top``, over a Unix socket
"""
