"""Analyses of traces, graphs and simulated runs."""
