"""Scoring predictions against measured runs."""
