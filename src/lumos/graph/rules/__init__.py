"""A trace as a graph: nodes, and one rule per kind of dependency."""
