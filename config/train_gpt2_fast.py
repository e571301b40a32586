# GPT-2 124M on OpenWebText, with rotary positions and Muon. Both lower the loss of small models on words, see
# docs/TRAINING.md (the recipe). They have not been measured at this size
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_fast.py --wandb_log=False
import pathlib

exec(pathlib.Path(__file__).with_name('train_gpt2.py').read_text())  # what follows is different from it

out_dir = 'out-gpt2-fast'
wandb_run_name = 'gpt2-124M-fast'

position = 'rope'
optimizer = 'muon'
muon_lr = 0.01
