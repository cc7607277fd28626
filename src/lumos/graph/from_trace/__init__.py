"""From a Trace to a Graph: nodes, and one rule for every kind of dependency."""
