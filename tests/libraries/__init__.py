"""Tests of services, reduction, pipelines and checkpoints."""
