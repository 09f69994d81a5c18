"""What comes into the cut: `handed_in` is what a rank holds of it, `same_sample` whether the ranks
hold the same, found by `digest` and `comparisons`, and `scatter` what one rank holds alone.
"""
