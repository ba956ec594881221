"""Octavo's kernels. `octavo_kernels.ops` is the public face; nothing else is imported from outside, but for
`cpu.build`, by the command that compiles ahead."""
