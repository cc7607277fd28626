"""Costs of operators, collectives and the host."""
