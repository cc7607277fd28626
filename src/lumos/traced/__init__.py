"""Another configuration of a traced run, from the operators of its trace."""
