"""Synthetic traces, drawn from statistics of recorded ones."""
