"""A program in time: costed blocks, graph structure, simulation."""
