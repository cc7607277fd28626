"""Results as tables, pages and files."""
