"""
The parts of train.py.

    batches        token files, their tokenizers, and batches; a function of the seed and the iteration
    conversations  batches whose rows are conversations
    cpu            the training step on a CPU: memory that is kept, oneDNN, the loss in parts
    optimizer      AdamW, or Muon with AdamW
    log            printed lines, progress bar, log.csv, loss.png, Weights & Biases
    stopping       Ctrl-C and SIGTERM
    checkpointer   the two files of a run: what is in them, and when each is saved
    resuming       what a resumed run takes from them
    parallel       several processes, and a model of which each has a part
"""
