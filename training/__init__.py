"""The parts of train.py: batches out of a token file, the log, stopping, and the checkpoints of a run."""
