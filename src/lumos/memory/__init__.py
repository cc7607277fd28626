"""A program in bytes: peak memory of every stage."""
