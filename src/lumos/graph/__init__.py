"""Graph: what waits for what, and the simulator that runs it."""
