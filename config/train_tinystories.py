# a small GPT on short stories, by the recipe: python data/tinystories/prepare.py, then some 20 minutes on two cores
import pathlib

exec(pathlib.Path(__file__).with_name('train_shakespeare_char_fast.py').read_text())  # what follows differs

out_dir = 'out-tinystories'
wandb_project = 'tinystories'
dataset = 'tinystories'

block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.0
learning_rate = 6e-3
muon_lr = 0.01
max_iters = 1000
lr_decay_iters = 1000
