"""
The content of a `CellCache` in a safetensors file: positions, owners, and keys and values in their stored form.

A file of all sequences has all cells. A file of one sequence has the positions that its last token sees through the
window, or all positions if there is no window. Keys in float32 whose positions were changed are rotated before they are
saved. Keys in fewer bits are saved as they were written, with the shift by which they must still be rotated.

Follows state_write and state_read of llama.cpp's src/llama-kv-cache.cpp: `save` and `load` are these for one sequence
or for all. The format of the file is not llama.cpp's.
"""
import json

import numpy as np
import torch

from whole_file import replacing

FORMAT, VERSION = 'kvcache-state', 5


def settings(cache, one):
    """The settings that a file of one sequence, or of all, and the cache it is loaded into must have in common."""
    own = cache.own_layers
    found = dict(version=VERSION, layers=[None if layer is None else own.index(layer) for layer in cache.layers],
                 n_head_kv=cache.n_head_kv, head_dim=cache.head_dim, type_k=own[0].k.kind, type_v=own[0].v.kind,
                 rope_base=cache.rope_base, rope_scaling=list(cache.rope_scaling) or None,
                 n_swa=cache.n_swa)
    return found if one else found | dict(n_seq_max=cache.n_seq_max, unified=cache.unified)


def stored(cache):
    """(name, tensor (n_head, n_slots, ...)) of all keys and values."""
    for l, layer in enumerate(cache.own_layers):
        for name, rows in (('k', layer.k), ('v', layer.v)):
            for i, tensor in enumerate(rows.tensors()):
                yield f'{l}.{name}{i}', tensor


def slots_in(cache, stream, cells, tensor):
    """The slots of cells of a stream, on the device of a tensor."""
    return torch.from_numpy(stream * cache.kv_size + cells).to(tensor.device)


def save(cache, path, seq=None):
    """
    Write one sequence of a cache, or all, to a file. The file has one part for each stream, numbered from 0. ValueError
    if it cannot be written; then an earlier file of that name is still there, whole.
    """
    from safetensors.torch import save as to_bytes
    streams = range(len(cache.streams)) if seq is None else [cache.stream_of(seq)]
    cache.update()
    tensors = {}
    for part, s in enumerate(streams):
        cells = cache.streams[s]
        mine = cells.of(seq)
        if seq is not None and len(mine) and cache.n_swa:
            mine = mine[cells.pos[mine] > cache.seq_pos_max(seq) - cache.n_swa]
        owners = cells.owners[:, mine] if seq is None else np.ones((1, len(mine)), dtype=bool)
        for name, array in (('pos', cells.pos[mine]), ('shift', cells.shift[mine]), ('owners', owners.T)):
            tensors[f'{part}.{name}'] = torch.from_numpy(np.ascontiguousarray(array))
        for name, tensor in stored(cache):
            tensors[f'{part}.{name}'] = tensor[:, slots_in(cache, s, mine, tensor)].contiguous()
    header = settings(cache, one=False) | dict(one=seq is not None)
    try:
        with replacing(path) as f:
            f.write(to_bytes(tensors, {FORMAT: json.dumps(header)}))
    except OSError as e:
        raise ValueError(f"{path} cannot be written: {e}") from e


def load(cache, path, seq=None):
    """
    Replace the content of a cache by that of a file of all sequences, or sequence `seq` by that of a file of one. An
    empty sequence in the file empties `seq`. New cells are free ones, or ones that the window of another sequence
    hides. ValueError if the file does not fit this cache or is damaged, `NoSlot` if there is no room; then nothing has
    changed.
    """
    one = seq is not None
    tensors = read(cache, path, one)
    streams = [cache.stream_of(seq)] if one else range(len(cache.streams))
    parts = [checked_part(cache, path, tensors, part, 1 if one else len(cache.streams[part].seqs))
             for part in range(len(streams))]
    with cache.dry_run():
        cache.seq_rm(seq)
        found = [cache.streams[s].find(len(part['pos']), cache.n_swa) for s, part in zip(streams, parts)]
    cache.seq_rm(seq)
    for s, part, where in zip(streams, parts, found):
        if len(where):
            cells = cache.streams[s]
            owners = cells.owned_by(seq) if one else part['owners'].numpy().T
            cells.write(where, part['pos'].numpy(), owners, part['shift'].numpy())
            for name, tensor in stored(cache):
                tensor[:, slots_in(cache, s, where, tensor)] = part[name].to(tensor.device)


def read(cache, path, one):
    """{name: tensor} of a file. ValueError if it is no state of one sequence (or of all) that fits this cache."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, 'pt') as f:
            header = json.loads((f.metadata() or {}).get(FORMAT, 'null'))
            tensors = {name: f.get_tensor(name) for name in f.keys()}
    except (OSError, SafetensorError, json.JSONDecodeError) as e:
        raise ValueError(f"{path} cannot be read as the state of a cache: {e}") from e
    if not isinstance(header, dict):
        raise ValueError(f"{path} does not hold the state of a cache: give a file of state_save")
    if header.get('one') is not one:
        raise ValueError(f"{path} holds " + ("all sequences of a cache: load it without seq" if one else
                                             "one sequence: pass seq, the number that it gets"))
    differing = [f"{name} {header.get(name)} there and {value} here"
                 for name, value in settings(cache, one).items() if header.get(name) != value]
    if differing:
        raise ValueError(f"{path} was saved from another cache: " + ', '.join(differing))
    return tensors


def checked_part(cache, path, tensors, part, n_owners):
    """
    {name: tensor} of one part of a file. ValueError if a tensor is missing, or has a shape or values that cells
    cannot have.
    """
    n = tensors[f'{part}.pos'].numel() if f'{part}.pos' in tensors else 0
    expected = dict(pos=(torch.int64, (n,)), shift=(torch.int64, (n,)), owners=(torch.bool, (n, n_owners)))
    expected |= {name: (tensor.dtype, (len(tensor), n, *tensor.shape[2:])) for name, tensor in stored(cache)}
    found = {name: tensors.get(f'{part}.{name}') for name in expected}
    for name, tensor in found.items():
        came = 'missing' if tensor is None else (tensor.dtype, tuple(tensor.shape))
        if came != expected[name]:
            raise ValueError(f"{path} is damaged: {part}.{name} is {came}, not {expected[name]}: save it again")
    if ((found['pos'] < 0).any() or not found['owners'].any(dim=1).all() or found['shift'].any() and not cache.can_shift
            or not all(found[name].isfinite().all() for name in expected)):
        raise ValueError(f"{path} is damaged, it has cells without position or owner, shifts in a cache that cannot "
                         "shift, or keys and values that are no numbers: save it again")
    return found
