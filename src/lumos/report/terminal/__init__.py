"""Results as tables on a terminal."""
