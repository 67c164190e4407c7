"""Jobs of a few workers on this machine, over shared memory and over TCP."""
