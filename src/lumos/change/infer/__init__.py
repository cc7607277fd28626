"""Infer: the setup of a traced run, from its trace."""
