"""The samples that the page shows, read from the run's data set."""
