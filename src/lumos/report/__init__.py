"""How answers are shown: tables on a terminal, files by their extension, a Perfetto trace."""
