"""
Write a trained model, or one of Hugging Face's, in a format that others serve: gpt2 for learned positions and none,
starcoder2 for rope, mpt for alibi; and the families of Llama's kind.

    python export.py                         the newest out*/ckpt.pt to <its folder>/hf, for transformers, vLLM, TGI
    python export.py --to=gguf --type=q8_0   to <its folder>/model.gguf, for llama.cpp
    python export.py --init_from=gpt2 --path=gpt2-folder

What was written and how to serve it goes to stderr.
"""
import os
import shlex
import sys

import configurator  # before torch: it says so in one line where torch is missing

# isort: split
import checkpoint
import model as plain_model
from formats import to_gguf, to_huggingface

to = 'hf'             # hf, a folder in Hugging Face format; gguf, a file for llama.cpp
type = 'f32'          # of the numbers in a gguf: f32, or q8_0, 8 bits in blocks of 32
init_from = 'resume'  # resume (from out_dir), owner/name of a model on the hub, gpt2 (-medium, -large, -xl), a folder
                      # in Hugging Face format, or a GGUF file
out_dir = ''          # where ckpt.pt is; by default wherever the newest out*/ckpt.pt is
path = ''             # the folder or file to write; by default hf or model.gguf beside ckpt.pt


def main(config):
    if to not in ('hf', 'gguf') or type not in ('f32', 'q8_0') or to == 'hf' and type == 'q8_0':
        raise ValueError(f"to must be hf, or gguf with type f32 or q8_0, not {to!r} with {type!r}")
    model, tokenizer, folder = checkpoint.load_model(init_from, out_dir, plain_model)
    target = path or os.path.join(folder, 'hf' if to == 'hf' else 'model.gguf')
    if os.path.exists(target) and os.path.exists(init_from) and os.path.samefile(target, init_from):
        raise ValueError(f"{target} is what the model is read from, and would be overwritten: give another --path")
    if to == 'hf':
        family = to_huggingface(model, target, tokenizer)
        print(f"{target}, a {family}: {', '.join(sorted(os.listdir(target)))}", file=sys.stderr)
        print(f"serve it with: vllm serve {shlex.quote(target)}", file=sys.stderr)
    else:
        kind = to_gguf(model, target, type, tokenizer)
        print(f"{target}: {os.path.getsize(target) / 1e6:.1f} MB, {type}, tokenizer {kind}", file=sys.stderr)
        print("llama.cpp differs in GELU, windows, long texts and new characters: see docs/SERVING.md", file=sys.stderr)
        print(f"serve it with: llama-server -m {shlex.quote(target)}", file=sys.stderr)


if __name__ == '__main__':
    configurator.run(main)
