"""From files to a Trace."""
