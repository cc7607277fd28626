"""Runs as files of other tools: Kineto, Perfetto, launch files."""
