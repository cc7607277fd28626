"""The described training step: its program, priced and simulated."""
