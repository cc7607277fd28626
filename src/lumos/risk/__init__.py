"""Variation of step times, failures, and what they cost."""
