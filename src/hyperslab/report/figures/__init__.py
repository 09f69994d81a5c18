"""The figures: inline SVG, one file for each subject."""
