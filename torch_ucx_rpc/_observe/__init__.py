"""The reports of a worker on itself while it runs.

* ``statistics``  `statistics`, and the snapshot that it returns
* ``log``         warnings of the agent in Python's logging
* ``prometheus``  serves a snapshot to Prometheus, over HTTP
* ``socket``      serves a snapshot to ``python -m torch_ucx_rpc top``, over a Unix socket
"""
