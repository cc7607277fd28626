"""Trace: what a run did, as columns; files are read into it here."""
