"""Export: runs as files of other tools (Kineto, Perfetto, Chakra)."""
