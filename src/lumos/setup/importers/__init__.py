"""Importers: setups from the files of other tools, one module for each, found by `any_file.read_any`."""
