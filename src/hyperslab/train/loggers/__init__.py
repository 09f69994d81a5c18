"""Where the numbers of a run go besides its CSV files: TensorBoard, Weights & Biases, MLflow."""
