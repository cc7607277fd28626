"""Chakra execution traces and ASTRA-sim: files, costs, estimates, comparisons."""
