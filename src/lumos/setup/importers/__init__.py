"""Importers: setups from the files of other tools, one module for each, found by `detect.read_any`."""
