"""What several formats share: finding, checking, naming and laying out files."""
