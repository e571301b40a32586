"""The model and tokenizer that a script was asked for: a checkpoint, GPT-2, or a folder in Hugging Face format."""
import os
import sys

import checkpoint as checkpoints
import tokenizer as tokenizers
from formats import check_vocabulary


def load(init_from, out_dir, gpt, device='cpu'):
    """
    (model in eval mode on device, its tokenizer, the folder where files that are made from it belong).

    init_from: 'resume' is out_dir/ckpt.pt, or the newest out*/ckpt.pt where out_dir is ''. Anything else is what
        GPT.from_pretrained takes: a GPT-2's name, or a folder in Hugging Face format.
    gpt: the module whose GPT and GPTConfig are used, model or debug_kv_model.

    A folder's tokenizer is the one in its meta.json, which export.py writes, and GPT-2's where there is none. What was
    loaded goes to stderr. Raises ValueError where there is no such model, or the tokenizer is not the model's.
    """
    if init_from != 'resume':
        model = gpt.GPT.from_pretrained(init_from)
        tokenizer = tokenizers.from_state(tokenizers.state_of_dataset(init_from))
        what, folder = init_from, out_dir or 'out-' + os.path.basename(os.path.abspath(init_from))
    else:
        path = os.path.join(out_dir, 'ckpt.pt') if out_dir else (checkpoints.newest_first() or ['out/ckpt.pt'])[0]
        checkpoint = checkpoints.load(path, device)
        model, tokenizer = checkpoints.build(checkpoint, gpt.GPT, gpt.GPTConfig), checkpoints.tokenizer_of(checkpoint)
        what, folder = f"{path}: iteration {checkpoint.get('iter_num', '?')}", os.path.dirname(path)
    check_vocabulary(model, tokenizer)
    n_params, block_size = model.get_num_params(), model.config.block_size
    print(f"{what}, {n_params / 1e6:.2f}M parameters, block_size {block_size}", file=sys.stderr)
    return model.to(device).eval(), tokenizer, folder
