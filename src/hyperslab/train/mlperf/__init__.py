"""The lines by which an MLPerf benchmark is judged, written by MLPerf's own package."""
