"""One file a command: arguments in, answers out."""
