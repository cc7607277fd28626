"""What operators and collectives cost."""
