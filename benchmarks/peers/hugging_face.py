"""Hugging Face transformers."""
import tempfile
from functools import lru_cache

import torch

from benchmarks.peers.peer import Peer
from benchmarks.shapes import random_tokens
from device import synchronize, torch_threads
from formats import to_huggingface


class HuggingFace(Peer):
    """transformers' generate with its growing cache and torch's attention, the fastest of its options on a CPU."""
    name = 'Hugging Face generate'
    packages = {'transformers': 'transformers', 'safetensors': 'safetensors'}

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        self.model = in_transformers(model)

    def generate(self, prompts, n_new):
        with torch_threads(self.threads):
            tokens = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=n_new,
                                         do_sample=False, eos_token_id=None, pad_token_id=0)
        return tokens[:, prompts.size(1):]


@lru_cache(maxsize=1)
def in_transformers(model):
    """The model as a model of transformers, in float32. The last one is kept, for engines with other threads."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        to_huggingface(model, folder)
        return AutoModelForCausalLM.from_pretrained(folder).float().eval()


def compiled_on_gpu(model, B, n_new):
    """
    A function that draws n_new tokens for B sequences by transformers' generate with its static cache, whose step it
    compiles and records.
    """
    theirs, weight = in_transformers(model), model.lm_head.weight
    theirs.to(weight.device, weight.dtype)
    torch._dynamo.reset()  # else it would compile a step for any number of sequences
    idx = random_tokens(model, B, 1).to(weight.device)
    how = dict(max_new_tokens=n_new, min_new_tokens=n_new, do_sample=True, temperature=0.8, top_k=0, top_p=1.0,
               pad_token_id=0, cache_implementation='static')

    def run():
        theirs.generate(idx, attention_mask=torch.ones_like(idx), **how)
        synchronize(str(idx.device))
    return run
