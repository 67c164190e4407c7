"""Tests that start processes on this machine: programs, and jobs of a few workers over shared memory and TCP."""
