"""Hugging Face transformers."""
import tempfile
from functools import lru_cache

import torch

from benchmarks.peers.engine import Engine, torch_threads
from formats import to_huggingface


class HuggingFace(Engine):
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
