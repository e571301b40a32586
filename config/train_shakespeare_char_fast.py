# the model of train_shakespeare_char.py, trained to a lower loss in less time, see docs/TRAINING.md (the recipe).
# The recipe was measured on CPUs only. On a GPU this file changes only position and optimizer
import pathlib
import sys

import torch

exec(pathlib.Path(__file__).with_name('train_shakespeare_char.py').read_text())  # what follows is different from it

out_dir = 'out-shakespeare-char-fast'
wandb_run_name = 'mini-gpt-fast'

position = 'rope'
optimizer = 'muon'
muon_lr = 0.02

if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
    # batches are larger than 12 because the time of Muon's step does not depend on their size
    batch_size, max_iters = 16, 1150
    onednn = True
    if torch.cpu.get_capabilities().get('avx512_bf16'):  # elsewhere bfloat16 is slow
        dtype, batch_size = 'bfloat16', 24
    print(f"the recipe: batches of {batch_size} instead of 12, {max_iters} iterations instead of 2000", file=sys.stderr)
    learning_rate, muon_lr, muon_weight_decay, beta2 = 6e-3, 0.03, 0.1, 0.95
    warmup_iters = 20
    lr_decay_iters = max_iters
    eval_interval = 500
