"""The names of a GPT's weights in the families of transformers. The gguf library knows its own names by these."""
from typing import NamedTuple

CONV1D = 'c_attn.weight', 'c_proj.weight', 'c_fc.weight'  # GPT-2's own files have these as (in, out)


class Names(NamedTuple):
    """
    parts: {our name of a part: theirs, or theirs in the order of our rows if the part is several matrices there}.
    layers: what stands before the number of a layer. base: what may stand before any name but lm_head's.
    """
    parts: dict
    layers: str
    base: str

    def full(self, name):
        """`of`, with what stands before the names in files."""
        return [self.base * (name != 'lm_head.weight') + their_name for their_name in self.of(name)]

    def of(self, name):
        """transformer.h.0.mlp.c_fc.weight -> ['layers.0.mlp.c_fc.weight'], without `base`."""
        if name == 'lm_head.weight':
            return [name]
        *path, kind = name.removeprefix('transformer.').split('.')
        layer = ''
        if path[0] == 'h':
            layer, path = f'{self.layers}.{path[1]}.', path[2:]
        part = self.parts['.'.join(path)]
        return [f'{layer}{theirs}.{kind}' for theirs in ((part,) if isinstance(part, str) else part)]


OURS = ('wte', 'wpe', 'ln_f', 'ln_1', 'attn.c_attn', 'attn.q_norm', 'attn.k_norm', 'attn.c_proj', 'ln_2', 'mlp.c_fc',
        'mlp.c_gate', 'mlp.c_proj')
GPT2 = Names({part: part for part in OURS}, 'h', 'transformer.')
ROPE = {  # of starcoder2 and Llama's family
    'wte': 'embed_tokens', 'ln_f': 'norm', 'ln_1': 'input_layernorm',
    'attn.c_attn': ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'), 'attn.c_proj': 'self_attn.o_proj',
    'ln_2': 'post_attention_layernorm',
}
LLAMA = Names(ROPE | {
    'attn.q_norm': 'self_attn.q_norm', 'attn.k_norm': 'self_attn.k_norm', 'mlp.c_fc': 'mlp.up_proj',
    'mlp.c_gate': 'mlp.gate_proj', 'mlp.c_proj': 'mlp.down_proj',
}, 'layers', 'model.')
HUGGING_FACE = {
    'gpt2': GPT2,
    'gpt_bigcode': GPT2,
    'starcoder2': Names(ROPE | {'mlp.c_fc': 'mlp.c_fc', 'mlp.c_proj': 'mlp.c_proj'}, 'layers', 'model.'),
    **dict.fromkeys(('llama', 'mistral', 'qwen2', 'qwen3'), LLAMA),
    'mpt': Names({
        'wte': 'wte', 'ln_f': 'norm_f', 'ln_1': 'norm_1', 'attn.c_attn': 'attn.Wqkv', 'attn.c_proj': 'attn.out_proj',
        'ln_2': 'norm_2', 'mlp.c_fc': 'ffn.up_proj', 'mlp.c_proj': 'ffn.down_proj',
    }, 'blocks', 'transformer.'),
}
