"""Measure: time operators and collectives (`lumos sample`), and fit cost models to the samples (`lumos fit`)."""
