# the loss of OpenAI's gpt2-large on our data
#   python train.py config/eval_gpt2_large.py
batch_size = 8
eval_iters = 500  # more batches, a better estimate
eval_only = True
wandb_log = False
init_from = 'gpt2-large'
