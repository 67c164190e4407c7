"""Other workers, and this one's life among them: what the libraries stand on.

* ``lost``      `on_lost`, a callback for the end of other workers
* ``life``      one life of this worker, and objects of the libraries that last as long
* ``futures``   futures that fail without keeping what their exceptions know
* ``members``   `group`, the workers of a library, whose epochs one of them decides
* ``epochs``    the protocol of that, without a network
* ``messages``  members, epochs, and what members say to each other
* ``probes``    ports by which the end of a process is seen
"""
