"""Blocks: what one rank runs for one layer or end of the model, from a description."""
