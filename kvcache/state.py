"""
The cells of a `KVCache` on disk: positions, owners, and keys and values as they are kept, in one safetensors file.
"""
import json

import numpy as np
import torch

from whole_file import replacing

FORMAT, VERSION = 'kvcache-state', 1


def shapes(cache):
    """What a file and a cache have to agree about."""
    layers = cache.own_layers()
    return dict(n_layer=len(layers), n_head_kv=cache.n_head_kv, head_dim=cache.head_dim, type_k=layers[0].k.kind, type_v=layers[0].v.kind)


def stored(cache):
    """(name, tensor (n_stream, kv_size, ...)) of everything that cells hold."""
    for l, layer in enumerate(cache.own_layers()):
        for name, rows in (('k', layer.k), ('v', layer.v)):
            for i, tensor in enumerate(rows.tensors()):
                yield f'{l}.{name}{i}', tensor


def save(cache, path, seq=None):
    """Write one sequence of a cache, or all, to a file that is there whole or not at all."""
    from safetensors.torch import save as to_bytes
    cache.update()
    tensors, counts = {}, []
    for s, cells in enumerate(cache.streams):
        mine = torch.from_numpy(np.flatnonzero(cells.of(seq) & (seq is None or cache.stream_of(seq) == s)))
        counts.append(len(mine))
        for name in ('pos', 'shift', 'owners'):
            tensors[f'{s}.{name}'] = torch.from_numpy(getattr(cells, name))[mine]
        for name, tensor in stored(cache):
            tensors[f'{s}.{name}'] = tensor[s, mine.to(tensor.device)].contiguous()
    header = dict(shapes(cache), version=VERSION, counts=counts, seq=seq, n_seq_max=cache.n_seq_max, unified=cache.unified)
    with replacing(path) as f:
        f.write(to_bytes(tensors, {FORMAT: json.dumps(header)}))


def load(cache, path, seq=None):
    """
    All of a file into the place of everything in the cache, or the one sequence it holds into the place of `seq`, wherever there
    are free cells. ValueError if it does not fit this cache, and nothing has changed.
    """
    header, tensors = read(path)
    differing = [f"{name} {header.get(name)} there and {value} here" for name, value in shapes(cache).items() if header.get(name) != value]
    if header.get('version') != VERSION or differing:
        raise ValueError(f"{path} is of another cache: " + (', '.join(differing) or f"format version {header.get('version')}, not {VERSION}"))
    if (seq is None) != (header['seq'] is None):
        raise ValueError(f"{path} holds {'all sequences: load them without seq' if seq is not None else 'one sequence: say which it becomes'}")
    if seq is None and (header['n_seq_max'], header['unified']) != (cache.n_seq_max, cache.unified):
        raise ValueError(f"{path} has {header['n_seq_max']} sequences, {'' if header['unified'] else 'not '}unified, unlike this cache")
    before = [cells.copy() for cells in cache.streams]
    if seq is None:
        cache.clear()
        places = [(s, s) for s in range(len(cache.streams))]
    else:
        cache.seq_rm(seq)
        places = [(0 if header['unified'] else header['seq'], cache.stream_of(seq))]  # (stream in the file, stream here)
    found = [cache.streams[here].find(header['counts'][there]) for there, here in places]
    if any(where is None for where in found):
        cache.streams = before
        raise ValueError(f"{path} has {sum(header['counts'])} cells, and there is no room for them: make the cache larger, or remove a sequence")
    for (there, here), where in zip(places, found):
        if not len(where):
            continue
        owners = tensors[f'{there}.owners'].numpy()
        if seq is not None:
            owners = np.arange(cache.n_seq_max) == np.full((len(where), 1), seq)
        cache.streams[here].put(where, tensors[f'{there}.pos'].numpy(), owners)
        cache.streams[here].shift[where] = tensors[f'{there}.shift'].numpy()
        for name, tensor in stored(cache):
            tensor[here, torch.from_numpy(where).to(tensor.device)] = tensors[f'{there}.{name}'].to(tensor.device)


def read(path):
    """(header, tensors) of a file; ValueError if it is not one of ours."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, 'pt') as f:
            header = json.loads((f.metadata() or {}).get(FORMAT, '{}'))
            if not header:
                raise ValueError(f"{path} holds no state of a cache")
            return header, {name: f.get_tensor(name) for name in f.keys()}
    except (OSError, SafetensorError, json.JSONDecodeError) as e:
        raise ValueError(f"{path} cannot be read as the state of a cache: {e}") from e
