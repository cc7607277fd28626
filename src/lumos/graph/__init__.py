"""Execution graphs and their simulator."""
