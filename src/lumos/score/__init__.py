"""Predictions compared with measured runs."""
