"""
The parts of train.py.

    batches        training batches from a token file; a function of the seed and the iteration
    log            printed lines, progress bar, log.csv, loss.png, Weights & Biases
    stopping       Ctrl-C and SIGTERM
    checkpointer   which file is saved when, and what a resumed run takes from it
    plotting       matplotlib, for all pictures of the repository
"""
