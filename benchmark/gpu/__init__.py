"""Checks of the parts that run on a GPU against the CPU, and their cost on the GPU."""
