"""Octavo inside tritonserver, and the launcher that runs one."""
