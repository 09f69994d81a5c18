"""Before the process group: where the ranks meet, who comes, and whether they are one run."""
