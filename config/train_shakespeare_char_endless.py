# a character-level GPT whose context has no end: rotary positions, and a window with sinks in place of a full context.
# train.py with this file, and then sample.py --use_cache=True --max_new_tokens=100000: each token costs the same
import sys

import torch

out_dir = 'out-shakespeare-char-endless'
eval_interval = 250  # often, because it overfits
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # the best one only

wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt-endless'

dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256  # tokens of a training row: more than the window, so that training sees what has left it

position = 'rope'  # no table of positions that ends
window = 128  # through the layers a token depends on n_layer * (window - 1) tokens before it, and on the sinks
n_sink = 4

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3  # high: the network is small
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99  # high: an iteration has few tokens, so average over more iterations

warmup_iters = 100

if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
    print("no GPU here: using smaller settings (4 layers of 128 channels, block_size 128, window 64, 2000 iterations)",
          file=sys.stderr)
    batch_size = 12
    block_size = 128
    window = 64
    n_layer = 4
    n_head = 4
    n_embd = 128
    dropout = 0.0
    learning_rate = 3e-3  # higher still
    eval_iters = 20
    max_iters = 2000
    lr_decay_iters = 2000
