"""Tests of one piece in one process."""
