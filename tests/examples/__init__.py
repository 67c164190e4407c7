"""The examples and the tutorials, run as their pages say."""
