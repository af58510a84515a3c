"""Results as tables: for a terminal, in Markdown, LaTeX and CSV."""
