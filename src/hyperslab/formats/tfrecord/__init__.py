"""TFRecords of CosmoFlow without TensorFlow: MLPerf's, one sample a file, and SC18's."""
