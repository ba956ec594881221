"""Octavo's kernels. `octavo_kernels.ops` is the public face; `cpu.build` compiles ahead, for the command line.

Nothing else is imported from outside.
"""
