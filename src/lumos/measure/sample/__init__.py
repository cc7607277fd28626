"""Measuring operators on the GPU at hand."""
