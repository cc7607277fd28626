"""Trace: the events of a run as numpy columns."""
