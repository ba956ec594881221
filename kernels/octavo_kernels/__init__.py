"""Octavo's kernels. `octavo_kernels.ops` is the public face; nothing else is imported from outside."""
