"""The page: HTML and its style sheet."""
