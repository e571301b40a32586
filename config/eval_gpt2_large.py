# the loss of OpenAI's gpt2-large on our data
batch_size = 8
eval_iters = 500  # more batches, a better estimate
eval_only = True
init_from = 'gpt2-large'
