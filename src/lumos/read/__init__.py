"""Files of other tools as traces."""

GRAPH_READERS = {"CHAKRA": "lumos.chakra.run_reader:BINARY", "CHAKRA_JSON": "lumos.chakra.run_reader:JSON"}
"""By the name of a Form: the `GraphReader` of files that are graphs already, imported only to read one."""
