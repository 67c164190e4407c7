"""All tests. README.md is their map."""
