"""CTranslate2."""
import copy
import os
import tempfile

import torch

from benchmarks.peers.hugging_face import HuggingFace, in_transformers
from benchmarks.peers.peer import Peer


class CTranslate2(Peer):
    """
    CTranslate2, by its own converter from transformers.

    int8 has one scale a row, and inputs are rounded to 8 bits as well. On small models two threads can be several times
    slower than one.
    """
    name = 'CTranslate2'
    packages = {'ctranslate2': 'ctranslate2', **HuggingFace.packages}
    ways = {'float32': [{}], 'int8': [{}]}
    families = 'gpt2',

    def __init__(self, model, weights='float32', threads=1):
        if torch.backends.cpu.get_cpu_capability() == 'AVX512':
            # its default on AMD is AVX2; the variable is read when the library is first loaded
            os.environ.setdefault('CT2_FORCE_CPU_ISA', 'AVX512')
        super().__init__(model, weights, threads)
        import ctranslate2
        from ctranslate2.converters.transformers import GPT2Loader
        # a copy, because `optimize` rounds the weights where they are
        spec = GPT2Loader().get_model_spec(copy.deepcopy(in_transformers(model)))
        spec.register_vocabulary([str(i) for i in range(self.config.vocab_size)])
        spec.validate()
        spec.optimize(quantization=weights)
        with tempfile.TemporaryDirectory() as folder:
            spec.save(folder)
            self.generator = ctranslate2.Generator(folder, compute_type=weights, intra_threads=threads)

    def generate(self, prompts, n_new):
        words = [[str(token) for token in row] for row in prompts.tolist()]
        # an end token outside the vocabulary is never sampled, so all rows go on to max_length
        results = self.generator.generate_batch(words, max_length=n_new, end_token=[self.config.vocab_size],
                                                include_prompt_in_result=False)
        return torch.tensor([result.sequences_ids[0] for result in results])
