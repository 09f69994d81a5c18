"""Metrics: errors of predicted numbers, confusion matrices of predicted classes."""
