"""Octavo's client package: the `octavo` command, and what talks to a server. Needs no part of the engine."""
