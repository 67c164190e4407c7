"""PyTorch's own RPC suites."""
