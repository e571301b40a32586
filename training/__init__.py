"""
The parts of train.py.

    batches        token files, their tokenizers, and batches; a function of the seed and the iteration
    cpu            the training step on a CPU: memory that is kept, oneDNN, the loss in parts
    optimizer      AdamW, or Muon with AdamW
    log            printed lines, progress bar, log.csv, loss.png, Weights & Biases
    stopping       Ctrl-C and SIGTERM
    checkpointer   which file is saved when, and what a resumed run takes from it
    parallel       several processes: what they agree on, and a model of which each has a part
    shards         the checkpoints of such a model: folders; made into a ckpt.pt, and back
    plotting       matplotlib, for all pictures of the repository
"""
