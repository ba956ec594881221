"""Runs step plans against a model: rows, inputs, forward, sampling."""
