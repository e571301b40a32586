"""
The cells of a `KVCache` on disk: positions, owners, and keys and values as they are kept, in one safetensors file.

What is saved: of all sequences, all cells. Of one sequence, what its window still sees from its last position, or all
positions where there is no window. Keys whose positions were changed are turned before they are saved; those that are
kept in fewer bits are saved as they were written, with the turn that is still to be made.
"""
import json

import numpy as np
import torch

from kvcache.streams import LARGEST, counted
from whole_file import replacing

FORMAT, VERSION = 'kvcache-state', 3


def shapes(cache):
    """What a file and a cache have to agree about."""
    own, window = cache.own_layers(), cache.window
    return dict(layers=[None if layer is None else own.index(layer) for layer in cache.layers],
                n_head_kv=cache.n_head_kv, head_dim=cache.head_dim, type_k=own[0].k.kind, type_v=own[0].v.kind,
                rope_base=cache.rope_base, window=[window.kind, window.n_swa] if window else None)


def stored(cache):
    """(name, tensor (n_stream, kv_size, ...)) of everything that cells hold."""
    for l, layer in enumerate(cache.own_layers()):
        for name, rows in (('k', layer.k), ('v', layer.v)):
            for i, tensor in enumerate(rows.tensors()):
                yield f'{l}.{name}{i}', tensor


def save(cache, path, seq=None):
    """
    Write one sequence of a cache, or all, to a file, which is there whole or not at all. One part for each stream,
    numbered from 0. ValueError if it cannot be written.
    """
    from safetensors.torch import save as to_bytes
    streams = range(len(cache.streams)) if seq is None else [cache.stream_of(seq)]
    cache.update()
    tensors = {}
    for part, s in enumerate(streams):
        cells = cache.streams[s]
        mine = cells.of(seq)
        if seq is not None and len(mine) and cache.window:
            mine = cells.of(seq, cache.window.first(cells.pos_max(seq)))
        owners = cells.owners[:, mine] if seq is None else np.ones((1, len(mine)), dtype=bool)
        for name, array in (('pos', cells.pos[mine]), ('shift', cells.shift[mine]), ('owners', owners.T)):
            tensors[f'{part}.{name}'] = torch.from_numpy(np.ascontiguousarray(array))
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
    All of a file into the place of everything in the cache, or the one sequence it holds into the place of `seq`, an
    empty one too. The cells are any that are free, or that the window of another sequence has passed. ValueError if the
    file does not fit this cache, or is damaged, and nothing has changed.
    """
    header, tensors = read(path)
    if header.get('version') != VERSION:
        raise ValueError(f"{path} has format version {header.get('version')!r}, not {VERSION}: save it again")
    differing = [f"{name} {header.get(name)} there and {value} here"
                 for name, value in shapes(cache).items() if header.get(name) != value]
    if differing:
        raise ValueError(f"{path} is of another cache: " + ', '.join(differing))
    one = header.get('one') is True
    if one != (seq is not None):
        say = 'one sequence: say which it becomes' if one else 'all sequences: load them without seq'
        raise ValueError(f"{path} holds {say}")
    if not one and (header.get('n_seq_max'), header.get('unified')) != (cache.n_seq_max, cache.unified):
        kind = 'unified' if header.get('unified') else 'not unified'
        raise ValueError(f"{path} has {header.get('n_seq_max')} sequences, {kind}, unlike this cache")
    streams = [cache.stream_of(seq)] if one else range(len(cache.streams))
    parts = [part_of(cache, path, tensors, part, 1 if one else len(cache.streams[part].seqs))
             for part in range(len(streams))]
    found = cache.rehearse(places, streams, parts, seq)
    if any(where is None for where in found):
        needed = sum(len(part['pos']) for part in parts)
        raise ValueError(f"{path} has {needed} cells, and there is no room for them: make the cache larger, "
                         "or remove a sequence")
    cache.seq_rm(seq)  # first, so that an interrupt leaves no cell with the keys of another
    for s, part, where in zip(streams, parts, found):
        for name, tensor in stored(cache):
            tensor[s, torch.from_numpy(where).to(tensor.device)] = part[name].to(tensor.device)
    fill(cache, streams, parts, found, seq)


def places(cache, streams, parts, seq):
    """Cells for each part once the sequence that it replaces is removed, or None."""
    cache.seq_rm(seq)
    return [cache.streams[s].find(len(part['pos']), cache.window) for s, part in zip(streams, parts)]


@counted
def fill(cache, streams, parts, found, seq):
    """Give cells that were found the positions and owners of the parts."""
    for s, part, where in zip(streams, parts, found):
        if not len(where):
            continue
        cells = cache.streams[s]
        cells.put(where, part['pos'].numpy())
        cells.shift[where] = part['shift'].numpy()
        for owner, mine in zip([seq] if seq is not None else cells.seqs, part['owners'].numpy().T):
            cells.own(where[mine], owner)


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
