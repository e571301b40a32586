"""CTranslate2."""
import os
import tempfile

import numpy as np
import torch

from benchmarks.peers.engine import Engine, array


class CTranslate2(Engine):
    """
    CTranslate2, by its own description of a pre-norm decoder with learned positions.

    int8 has one scale a row, and inputs are rounded to 8 bits as well. On small models two threads can be several times
    slower than one. Specification:
    https://opennmt.net/CTranslate2/python/ctranslate2.specs.TransformerDecoderModelSpec.html
    """
    name = 'CTranslate2'
    packages = {'ctranslate2': 'ctranslate2'}
    ways = {'float32': [{}], 'int8': [{}]}

    def __init__(self, model, weights='float32', threads=1):
        if torch.backends.cpu.get_cpu_capability() == 'AVX512':
            # its default on AMD is AVX2; the variable is read when the library is first loaded
            os.environ.setdefault('CT2_FORCE_CPU_ISA', 'AVX512')
        super().__init__(model, weights, threads)
        import ctranslate2
        spec = specification(model)
        spec.optimize(quantization=weights)
        with tempfile.TemporaryDirectory() as folder:
            spec.save(folder)
            self.generator = ctranslate2.Generator(folder, compute_type=weights, intra_threads=threads)

    def generate(self, prompts, n_new):
        prompts = self.checked(prompts, n_new)
        words = [[str(token) for token in row] for row in prompts.tolist()]
        # an end token outside the vocabulary is never sampled, so all rows go on to max_length
        results = self.generator.generate_batch(words, max_length=n_new, end_token=[self.config.vocab_size],
                                                include_prompt_in_result=False)
        return torch.tensor([result.sequences_ids[0] for result in results])


def specification(model):
    """A model as a TransformerDecoderModelSpec, with its weights in float32."""
    from ctranslate2.specs import TransformerDecoderModelSpec
    from ctranslate2.specs.common_spec import Activation
    c, t = model.config, model.transformer
    spec = TransformerDecoderModelSpec.from_config(c.n_layer, c.n_head, activation=Activation.GELU)  # the exact one
    spec.config.layer_norm_epsilon = t.ln_f.eps
    spec.register_vocabulary([str(i) for i in range(c.vocab_size)])
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = array(t.wte.weight)
    decoder.position_encodings.encodings = array(t.wpe.weight)
    decoder.projection.weight = array(model.lm_head.weight)
    layer_norms, linears = [(decoder.layer_norm, t.ln_f)], []
    for layer, block in zip(decoder.layer, t.h):
        layer_norms += [(layer.self_attention.layer_norm, block.ln_1), (layer.ffn.layer_norm, block.ln_2)]
        linears += [(layer.self_attention.linear[0], block.attn.c_attn),
                    (layer.self_attention.linear[1], block.attn.c_proj),
                    (layer.ffn.linear_0, block.mlp.c_fc), (layer.ffn.linear_1, block.mlp.c_proj)]
    for theirs, ours in layer_norms:
        theirs.gamma = array(ours.weight)
        theirs.beta = np.zeros_like(theirs.gamma) if ours.bias is None else array(ours.bias)
    for theirs, ours in linears:
        theirs.weight = array(ours.weight)
        if ours.bias is not None:
            theirs.bias = array(ours.bias)
    spec.validate()
    return spec
