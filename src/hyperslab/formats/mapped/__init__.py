"""Arrays as their owners keep them: by key, many in one file, with a table of parameters."""
