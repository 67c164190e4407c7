"""Tests of the libraries: channels, services, reduction, pipelines, checkpoints, and their common base."""
