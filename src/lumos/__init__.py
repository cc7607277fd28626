"""Lumos."""
