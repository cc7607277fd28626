"""Importers: setups from the files that people already have."""
