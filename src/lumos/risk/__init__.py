"""Risk: what can go wrong with a run, and how much it would cost."""
