"""Runs as files of other tools: Kineto, Perfetto, Chakra, launch files."""
