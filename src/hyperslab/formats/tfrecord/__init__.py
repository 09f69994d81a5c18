"""MLPerf's TFRecords, one sample a file, without TensorFlow."""
