# a small GPT on short stories, by the recipe: python data/tinystories/prepare.py, and about 20 minutes on two cores
import torch

out_dir = 'out-tinystories'
eval_interval = 250
eval_iters = 20
log_interval = 10
always_save_checkpoint = False  # the best one only

wandb_project = 'tinystories'

dataset = 'tinystories'
gradient_accumulation_steps = 1
batch_size = 24
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
position = 'rope'

optimizer = 'muon'
muon_lr = 0.01
learning_rate = 6e-3
beta2 = 0.99
warmup_iters = 20
max_iters = 1000
lr_decay_iters = 1000
min_lr = 6e-4

if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
    onednn = True
    if torch.cpu.get_capabilities().get('avx512_bf16'):  # elsewhere bfloat16 is slow
        dtype = 'bfloat16'
