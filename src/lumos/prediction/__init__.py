"""Predictions: interval, energy, cost, operators and trace of a simulated step."""
