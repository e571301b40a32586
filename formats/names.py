"""The names that other projects give to the weights of a GPT, and what they do to its matrices."""
from typing import NamedTuple

CONV1D = 'c_attn.weight', 'c_proj.weight', 'c_fc.weight'  # GPT-2's own files have these as (in, out)


class Names(NamedTuple):
    """
    The names of one project.

    parts: {our name of a part: theirs, or theirs in the order of our rows if the part is several matrices there}.
    layers: what stands before the number of a layer. base: what may stand before a name.
    """
    parts: dict
    layers: str
    base: str = ''

    def of(self, name):
        """transformer.h.0.mlp.c_fc.weight -> ['layers.0.mlp.c_fc.weight'], without `base`."""
        *path, kind = name.removeprefix('transformer.').split('.')
        layer = ''
        if path[0] == 'h':
            layer, path = f'{self.layers}.{path[1]}.', path[2:]
        part = self.parts['.'.join(path)]
        return [f'{layer}{theirs}.{kind}' for theirs in ((part,) if isinstance(part, str) else part)]


OURS = 'wte', 'wpe', 'ln_f', 'ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj'
GPT2 = Names({part: part for part in OURS}, 'h', 'transformer.')
HUGGING_FACE = {
    'gpt2': GPT2,
    'gpt_bigcode': GPT2,
    'starcoder2': Names({
        'wte': 'embed_tokens', 'ln_f': 'norm', 'ln_1': 'input_layernorm',
        'attn.c_attn': ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'),
        'attn.c_proj': 'self_attn.o_proj', 'ln_2': 'post_attention_layernorm', 'mlp.c_fc': 'mlp.c_fc',
        'mlp.c_proj': 'mlp.c_proj',
    }, 'layers', 'model.'),
    'mpt': Names({
        'wte': 'wte', 'ln_f': 'norm_f', 'ln_1': 'norm_1', 'attn.c_attn': 'attn.Wqkv', 'attn.c_proj': 'attn.out_proj',
        'ln_2': 'norm_2', 'mlp.c_fc': 'ffn.up_proj', 'mlp.c_proj': 'ffn.down_proj',
    }, 'blocks', 'transformer.'),
}
GGUF_PARTS = {
    'wte': 'token_embd', 'wpe': 'position_embd', 'ln_f': 'output_norm', 'ln_1': 'attn_norm', 'attn.c_attn': 'attn_qkv',
    'attn.c_proj': 'attn_output', 'ln_2': 'ffn_norm', 'mlp.c_fc': 'ffn_up', 'mlp.c_proj': 'ffn_down',
}
GGUF = {
    'gpt2': Names(GGUF_PARTS, 'blk'),
    'mpt': Names(GGUF_PARTS, 'blk'),
    'starcoder2': Names(GGUF_PARTS | {'attn.c_attn': ('attn_q', 'attn_k', 'attn_v')}, 'blk'),
}
