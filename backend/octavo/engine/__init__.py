"""Scheduling, paging and text: all that decides, and nothing that computes. Torch-free except engine.py."""
