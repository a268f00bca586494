"""Runs over several machines, started by torchrun."""
