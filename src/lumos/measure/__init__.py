"""Measure: sample operators on a GPU, and fit a cost model to the samples."""
