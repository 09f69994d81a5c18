"""What runs on one block and knows no rank."""
