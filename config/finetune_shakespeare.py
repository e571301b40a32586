# finetune GPT-2 XL on Shakespeare; on a small GPU, add --init_from=gpt2
import time

out_dir = 'out-shakespeare'
eval_interval = 5
eval_iters = 40
wandb_project = 'shakespeare'
wandb_run_name = 'ft-' + str(time.time())

dataset = 'shakespeare'
init_from = 'gpt2-xl'

always_save_checkpoint = False  # the best one only

# 1 row * 1024 tokens * 32 batches = 32,768 tokens per iteration; the training text has 301,966 tokens, so 20 iterations
# are 2 epochs
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20

learning_rate = 3e-5  # constant, and low: the weights are good already
decay_lr = False
