"""Prediction: the step of a described run, priced and simulated, and what follows from it."""
