"""The weights of a GPT as other projects have them: with all heads, biases and positions."""
import torch


def heads_of(w, config):
    """Rows of c_attn, a matrix or a bias, as those of the queries, keys and values."""
    kv = config.n_kv_head * config.head_dim
    return w.split([config.n_embd, kv, kv])


def with_all_heads(w, config):
    """Rows of c_attn with as many heads of keys and values as of queries: each one repeated for all its queries."""
    n_repeat = config.n_head // config.n_kv_head
    if n_repeat == 1:
        return w
    q, *kv = heads_of(w, config)
    return torch.cat([q] + [x.unflatten(0, (config.n_kv_head, -1)).repeat_interleave(n_repeat, 0).flatten(0, 1)
                            for x in kv])


def weights_with_biases(model):
    """
    The model's state dict on the CPU, without the tied lm_head, with zeros for the biases that it lacks, and with zeros
    as the positions of position='none'.
    """
    c, weights = model.config, {}
    for name, w in model.state_dict().items():
        weights[name] = w.cpu()
        if name.endswith('wte.weight') and c.position == 'none':
            weights[name.replace('wte', 'wpe')] = w.new_zeros(c.block_size, c.n_embd, device='cpu')
        if name.endswith('.weight') and not name.endswith(('wte.weight', 'wpe.weight')):
            # if the model has this bias, it comes next in the state dict and replaces the zeros
            weights[name.removesuffix('weight') + 'bias'] = w.new_zeros(len(w), device='cpu')
    del weights['lm_head.weight'], weights['lm_head.bias']
    return weights
