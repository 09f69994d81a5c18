"""Reads and writes TFRecords of CosmoFlow without TensorFlow, MLPerf's and SC18's."""
