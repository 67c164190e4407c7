"""Tests of the project's own tools, pages and layers."""
