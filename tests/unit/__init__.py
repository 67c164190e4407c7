"""Tests of one unit in one process."""
