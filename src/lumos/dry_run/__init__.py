"""Dry run: a model's own training step on fake tensors, with every operator recorded; no GPU, no weights, no memory."""
