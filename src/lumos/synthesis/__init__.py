"""Synthetic runs: statistics learned from traces, and new traces drawn from them that contain none of the originals."""
