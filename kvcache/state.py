"""
The cells of a `KVCache` on disk: positions, owners, and keys and values as they are kept, in one safetensors file.
"""
import json

import numpy as np
import torch

from kvcache.streams import LARGEST
from whole_file import replacing

FORMAT, VERSION = 'kvcache-state', 2


def shapes(cache):
    """What a file and a cache have to agree about."""
    own = cache.own_layers()
    return dict(layers=[None if layer is None else own.index(layer) for layer in cache.layers], n_head_kv=cache.n_head_kv,
                head_dim=cache.head_dim, type_k=own[0].k.kind, type_v=own[0].v.kind, rope_base=cache.rope_base)


def stored(cache):
    """(name, tensor (n_stream, kv_size, ...)) of everything that cells hold."""
    for l, layer in enumerate(cache.own_layers()):
        for name, rows in (('k', layer.k), ('v', layer.v)):
            for i, tensor in enumerate(rows.tensors()):
                yield f'{l}.{name}{i}', tensor


def save(cache, path, seq=None):
    """Write one sequence of a cache, or all, to a file that is there whole or not at all. One part a stream, numbered from 0."""
    from safetensors.torch import save as to_bytes
    streams = range(len(cache.streams)) if seq is None else [cache.stream_of(seq)]
    cache.update()
    tensors = {}
    for part, s in enumerate(streams):
        cells = cache.streams[s]
        mine = np.flatnonzero(cells.of(seq))
        owners = cells.owners if seq is None else cells.owners[:, [seq]]
        for name, array in (('pos', cells.pos), ('shift', cells.shift), ('owners', owners)):
            tensors[f'{part}.{name}'] = torch.from_numpy(array[mine])
        for name, tensor in stored(cache):
            tensors[f'{part}.{name}'] = tensor[s, torch.from_numpy(mine).to(tensor.device)].contiguous()
    header = dict(shapes(cache), version=VERSION, one=seq is not None, n_seq_max=cache.n_seq_max, unified=cache.unified)
    try:
        with replacing(path) as f:
            f.write(to_bytes(tensors, {FORMAT: json.dumps(header)}))
    except OSError as e:
        raise ValueError(f"{path} cannot be written: {e}") from e


def load(cache, path, seq=None):
    """
    All of a file into the place of everything in the cache, or the one sequence it holds into the place of `seq`, wherever there
    are free cells. ValueError if it does not fit this cache, or is damaged, and nothing has changed.
    """
    header, tensors = read(path)
    differing = [f"{name} {header.get(name)} there and {value} here" for name, value in shapes(cache).items() if header.get(name) != value]
    if header.get('version') != VERSION or differing:
        raise ValueError(f"{path} is of another cache: " + (', '.join(differing) or f"format version {header.get('version')}, not {VERSION}"))
    one = header.get('one') is True
    if one != (seq is not None):
        raise ValueError(f"{path} holds {'one sequence: say which it becomes' if one else 'all sequences: load them without seq'}")
    if not one and (header.get('n_seq_max'), header.get('unified')) != (cache.n_seq_max, cache.unified):
        raise ValueError(f"{path} has {header.get('n_seq_max')} sequences, {'' if header.get('unified') else 'not '}unified, unlike this cache")
    streams = [cache.stream_of(seq)] if one else range(len(cache.streams))
    parts = [part_of(cache, path, tensors, part, 1 if one else cache.n_seq_max) for part in range(len(streams))]

    before = [cells.copy() for cells in cache.streams]
    cache.seq_rm(seq)  # the cells only
    found = [cache.streams[s].find(len(part['pos'])) for s, part in zip(streams, parts)]
    if any(where is None for where in found):
        cache.streams = before
        needed = sum(len(part['pos']) for part in parts)
        raise ValueError(f"{path} has {needed} cells, and there is no room for them: make the cache larger, or remove a sequence")
    for s, part, where in zip(streams, parts, found):
        if not len(where):
            continue
        owners = np.zeros((len(where), cache.n_seq_max), dtype=bool)
        owners[:, [seq] if one else slice(None)] = part['owners']
        cache.streams[s].put(where, part['pos'].numpy(), owners)
        cache.streams[s].shift[where] = part['shift'].numpy()
        for name, tensor in stored(cache):
            tensor[s, torch.from_numpy(where).to(tensor.device)] = part[name].to(tensor.device)


def part_of(cache, path, tensors, part, n_owners):
    """{name: tensor} of one part of a file; ValueError unless it is all there, and cells could be like that."""
    n = tensors[f'{part}.pos'].numel() if f'{part}.pos' in tensors else 0
    expected = dict(pos=(torch.int64, ()), shift=(torch.int64, ()), owners=(torch.bool, (n_owners,)))
    expected |= {name: (tensor.dtype, tensor.shape[2:]) for name, tensor in stored(cache)}
    found = {name: tensors.get(f'{part}.{name}') for name in expected}
    for name, (dtype, shape) in expected.items():
        if found[name] is None or found[name].dtype != dtype or found[name].shape != (n, *shape):
            raise ValueError(f"{path} is damaged: {part}.{name} is not what it says it holds")
    if ((found['pos'] < 0) | (found['pos'] >= LARGEST)).any() or not found['owners'].any(dim=1).all():
        raise ValueError(f"{path} is damaged: cells without position or owner")
    if not all(found[name].isfinite().all() for name in expected):
        raise ValueError(f"{path} is damaged: there are keys or values that are no numbers")
    if n_owners > 1 and not cache.unified and (found['owners'] != (torch.arange(n_owners) == part)).any():
        raise ValueError(f"{path} is damaged: cells in the stream of another sequence")
    if found['shift'].any() and not cache.can_shift:
        raise ValueError(f"{path} is damaged: keys to be turned that cannot be")
    return found


def read(path):
    """(header, tensors) of a file; ValueError if it is not one of ours."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, 'pt') as f:
            header = json.loads((f.metadata() or {}).get(FORMAT, '{}'))
            if not header or not isinstance(header, dict):
                raise ValueError(f"{path} holds no state of a cache")
            return header, {name: f.get_tensor(name) for name in f.keys()}
    except (OSError, SafetensorError, json.JSONDecodeError) as e:
        raise ValueError(f"{path} cannot be read as the state of a cache: {e}") from e
