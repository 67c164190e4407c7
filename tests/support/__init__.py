"""Helpers of several folders of tests."""
