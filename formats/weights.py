"""The weights of a GPT as other projects have them: with all heads, biases and positions."""
from functools import reduce

import torch


def is_dense(x):
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_quantized and not x.is_meta


def once(weights):
    """
    {name: tensor} of pairs (name, tensor), without what may stand before a name: `_orig_mod.` of compiled models,
    `transformer.` or `model.` of a family. ValueError if two names are the same then, and their values are not.
    """
    found = {}
    for name, w in weights:
        name = name.removeprefix('_orig_mod.').removeprefix('transformer.').removeprefix('model.')
        if not same(found.setdefault(name, w), w):
            raise ValueError(f"the weights {name} are there twice, with different values")
    return found


def same(a, b):
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)  # NaN is not equal to itself


def common_dtype(weights):
    """A dtype that holds all numbers of these tensors: that of the matrices, or a wider one if the vectors need it."""
    dtype = reduce(torch.promote_types, {w.dtype for w in weights if w.dim() > 1} or {weights[0].dtype})
    others = [w for w in weights if w.dim() < 2 and w.dtype != dtype]
    return reduce(torch.promote_types, {w.dtype for w in others if not torch.equal(w, w.to(dtype).to(w.dtype))}, dtype)


def check_weights(config, names, weights):
    """
    ValueError unless `weights`, see `once`, have the number of layers, the embedding and the positions of config, and
    their lm_head, if there is one and config.tied, is the embedding. To be called before a model is built, because the
    sizes that are written in a file may be any numbers. names: those of the project that the weights are from.
    """
    n_layer = len({name.split('.')[1] for name in weights if name.startswith(names.layers + '.')})
    if n_layer != config.n_layer:
        raise ValueError(f"n_layer is {config.n_layer}, but the weights have {n_layer} layers")
    embedding, = names.of('transformer.wte.weight')
    sizes = {embedding: 'vocab_size', 'wpe.weight': 'block_size'}
    for name in sizes if config.position == 'learned' else [embedding]:
        shape = getattr(config, sizes[name]), config.n_embd
        if name not in weights or weights[name].shape != shape:
            found = tuple(weights[name].shape) if name in weights else "missing"
            raise ValueError(f"{sizes[name]} and n_embd are {shape}, but {name} is {found}")
    if config.tied and not same(weights.get('lm_head.weight', weights[embedding]), weights[embedding]):
        raise ValueError(f"lm_head.weight is not {embedding}, but the config says that it is: set tied, or "
                         "tie_word_embeddings, to false")


def heads_of(w, config):
    """Rows of c_attn, a matrix or a bias, as those of the queries, keys and values."""
    kv = config.n_kv_head * config.head_dim
    return w.split([config.n_head * config.head_dim, kv, kv])


def with_all_heads(w, config):
    """Rows of c_attn with as many heads of keys and values as of queries: each one repeated for all its queries."""
    n_repeat = config.n_head // config.n_kv_head
    q, *kv = heads_of(w, config)
    return torch.cat([q] + [x.unflatten(0, (config.n_kv_head, -1)).repeat_interleave(n_repeat, 0).flatten(0, 1)
                            for x in kv])


def named_weights(model, names):
    """Yields (our name, their name, tensor) of `weights_with_biases`; c_attn in three where it is three there."""
    for name, w in weights_with_biases(model).items():
        theirs = names.full(name)
        parts = [part.clone() for part in heads_of(w, model.config)] if len(theirs) > 1 else [w]
        for their_name, part in zip(theirs, parts):
            yield name, their_name, part


def weights_with_biases(model):
    """The state dict on the CPU, without a tied lm_head; positions and biases that only its family has are zeros."""
    c, weights = model.config, {}
    for name, w in model.state_dict().items():
        weights[name] = w.cpu()
        if name.endswith('wte.weight') and c.position == 'none':
            weights[name.replace('wte', 'wpe')] = w.new_zeros(c.block_size, c.n_embd, device='cpu')
        if c.norm == 'layer' and c.position != 'alibi' and name.endswith('.weight') and not name.endswith(
                ('wte.weight', 'wpe.weight', 'lm_head.weight')):
            # if the model has this bias, it comes next in the state dict and replaces the zeros
            weights[name.removesuffix('weight') + 'bias'] = w.new_zeros(len(w), device='cpu')
    if c.tied:
        del weights['lm_head.weight']
    return weights
