"""Calibration: what a trace says about the blocks of a step, to price another configuration of the same run."""
