"""Choice: which configuration of a run is best."""
