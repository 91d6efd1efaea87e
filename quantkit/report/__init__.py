"""Floor 5: tables and pictures from result records. Computes no number of its own."""
