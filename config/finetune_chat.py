# a chat model from a trained model: make real, then python data/chat/prepare.py, then train.py with this file.
# For another model give both --tokenizer=MODEL and --init_from=MODEL
import torch

out_dir = 'out-chat'
dataset = 'chat'
init_from = 'data/real/SmolLM2-135M-Instruct.Q4_1.gguf'

eval_interval = 16  # 16 batches of 8 are an epoch of data/chat/kv_cache.jsonl
eval_iters = 3
log_interval = 1
always_save_checkpoint = False  # the best one only

batch_size = 8
gradient_accumulation_steps = 1
block_size = 256  # a longer conversation is cut there

# AdamW, and not the recipe's Muon: its step would take three times as long as the passes of 8 short conversations
learning_rate = 1e-4
weight_decay = 0.0
warmup_iters = 8
max_iters = 96
lr_decay_iters = 96
min_lr = 1e-5

if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
    onednn = True
    if torch.cpu.get_capabilities().get('avx512_bf16'):  # elsewhere bfloat16 is slow
        dtype = 'bfloat16'
