"""Files of other tools as traces."""

GRAPH_READERS: dict[str, str] = {}  # by the name of a Form: the `GraphReader` of files that are graphs already
