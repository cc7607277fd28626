"""Prediction: what follows from a simulated step, traced or described."""
