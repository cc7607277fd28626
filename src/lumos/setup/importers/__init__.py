"""Setups from the files of other tools, one importer per module."""
