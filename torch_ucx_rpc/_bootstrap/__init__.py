"""The meeting of a job's workers, before the first call.

* ``site_settings``  refuses settings and limits of the site that RPC cannot work with
* ``rendezvous``     opens the Store: the place where workers meet
* ``listener``       finds out whether a server listens at an address
* ``deadline``       the end of a wait that has several steps
* ``record``         describes one worker to the others
* ``packing``        writes many records in few bytes
* ``relay``          lets a worker take the records of all workers from another worker
* ``members``        agrees on the members of a group of fixed size
* ``member_list``    keeps the list of a group that workers join and leave
* ``dynamic_group``  has its members admit workers that join, and forget those that leave
* ``expendable``     the Store of a running group; the group goes on if the Store ends
* ``secret``         authenticates Store entries, and derives the keys of frames
* ``lifeline``       shows workers on other hosts when this process ends
* ``forks``          closes sockets in forked children
* ``network``        chooses the network interface for UCX
"""
