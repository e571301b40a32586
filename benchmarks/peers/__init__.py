"""Other engines with the same weights, an adapter each, and `race`, which measures them in turns with ours."""
