"""Answers as tables on a terminal."""
