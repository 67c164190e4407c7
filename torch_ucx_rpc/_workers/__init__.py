"""Other workers, and the life of this worker: the base of the libraries.

* ``lost``      `on_lost`, a callback for the end of other workers
* ``life``      one life of this worker, and objects of the libraries that last as long
* ``futures``   futures that fail without keeping their exceptions' frames alive
* ``members``   `group`, the workers of a library, in epochs that one of them decides
* ``epochs``    the protocol of the groups, without a network
* ``messages``  members, epochs, and the members' messages
* ``probes``    ports that show the end of a process
"""
