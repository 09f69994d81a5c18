"""Several runs on one page: figures 9 and 10 of Oyama et al. 2020, with controls and intervals."""
