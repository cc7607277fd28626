"""Samples of operators and collectives, and the cost models fitted to them."""
