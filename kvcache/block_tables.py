"""
vLLM's call: the new tokens of any requests in one forward pass, with block tables and slots as arguments.
"""
from dataclasses import dataclass

import torch

from kvcache.blocks import needed_blocks
from kvcache.placement import LayerList, NotNumbers, Placement, check_tokens, logits_of
from positions import Keys

NOWHERE = 2**62  # a key position after any query position


@dataclass(frozen=True)
class PagedMetadata:
    """
    S requests, whose new tokens follow each other on one axis of N tokens. Tokens behind them are padding.

    slot_mapping: (N,) the slot for each token's keys and values; -1 writes nothing. block_tables: (S, n) the blocks of
    each request, in order; entries behind its end are any block, or -1. Blocks that no new token sees through the
    model's window may be gone: -1. query_lens: (S,) the number of new tokens of each, at least 1. seq_lens: (S,) the
    number of all tokens of each, the new ones included. block_numbers: (S, n) which block of its request each entry of
    block_tables is, so that a table may leave out blocks that are gone; None for 0, 1, 2, ...
    """
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_numbers: torch.Tensor | None = None

    def first_positions(self, block_size):
        """The position of the first slot of each entry of block_tables, (n,) or (S, n)."""
        n = self.block_tables.size(1)
        numbers = self.block_numbers
        if numbers is None:
            numbers = torch.arange(n, device=self.block_tables.device)
        return numbers * block_size


@torch.no_grad()
def execute_model(model, input_ids, input_positions, kv_caches, input_metadata):
    """
    Run the new tokens of all requests through the model in one pass.

    model: a GPT, or a decoder of one that has a compiled step. input_ids, input_positions: (N,). kv_caches: a `Layer`
    of (n_blocks, block_size) rows for each layer of the model. Returns logits (S, vocab_size), of each request's last
    token. ValueError if the arguments do not fit the model or each other, with nothing written. `NotNumbers` if the
    logits are not numbers: the rows that were written are then zeros.
    """
    decoder = model if hasattr(model, 'execute_model') else None
    model = decoder.model if decoder else model
    check(model.config, input_ids, input_positions, kv_caches, input_metadata)
    if decoder:
        check_tokens(model, input_ids)
        return kernel_pass(decoder, input_ids, kv_caches, input_metadata)
    try:
        return one_pass(model, input_ids, input_positions, kv_caches, input_metadata)
    except NotNumbers:  # because of the weights, or of keys in other requests' blocks that a mask does not hide
        return one_pass_each(model, input_ids, input_positions, kv_caches, input_metadata)


def one_pass_each(model, input_ids, input_positions, kv_caches, m):
    """One pass for each request, which reads zeros in place of what it may not see, see `LayerList.hiding`."""
    parts, start = [], 0
    for i, end in enumerate(m.query_lens.cumsum(0).tolist()):
        of_one = (each if each is None else each[i:i + 1]
                  for each in (m.block_tables, m.query_lens, m.seq_lens, m.block_numbers))
        alone = PagedMetadata(m.slot_mapping[start:end], *of_one)
        parts.append(one_pass(model, input_ids[start:end], input_positions[start:end], kv_caches, alone, hiding=True))
        start = end
    return torch.cat(parts)


def kernel_pass(decoder, input_ids, kv_caches, m):
    """The pass of `execute_model` by the compiled step of a decoder, which takes no padding and writes all tokens."""
    from kvcache.kernel_pass import KernelPass  # here, because it needs numba
    forward, counts = KernelPass.over(decoder, decoder.model, kv_caches), m.query_lens
    block_size, n = kv_caches[0].k.shape[1], int(counts.sum())
    if forward is None:
        raise ValueError(f"the compiled step does not read keys and values that are {kv_caches[0].k.kind}, stored as "
                         "they are here: pass the model in place of the decoder")
    if (m.slot_mapping[:n] < 0).any():
        raise ValueError("the compiled step writes the keys and values of every token: give each a slot, not -1, or "
                         "pass the model in place of the decoder")
    first, tables = m.first_positions(block_size).expand_as(m.block_tables).tolist(), []
    for positions, blocks, length in zip(first, m.block_tables.tolist(), m.seq_lens.tolist()):
        tables.append(forward.runs())
        for position, block in sorted(zip(positions, blocks)):
            if block >= 0 and position < length:
                tables[-1].append(position, block * block_size, block_size)
    counts, starts = counts.tolist(), (m.seq_lens - counts).tolist()
    return forward(input_ids[:n].contiguous(), forward.positions(starts, counts), forward.metadata(counts, tables))


def one_pass(model, input_ids, input_positions, kv_caches, m, hiding=False, wanted=None):
    """The forward pass of `execute_model`. hiding: see `LayerList.hiding`. wanted: the rows whose logits are wanted."""
    ends, block_size = m.query_lens.cumsum(0), kv_caches[0].k.shape[1]
    written = None if (m.slot_mapping >= 0).all() else (m.slot_mapping >= 0).nonzero()[:, 0]
    rows = m.slot_mapping if written is None else m.slot_mapping[written]
    n_used, (S, n) = int(m.block_tables.max()) + 1, m.block_tables.shape
    if S == len(input_ids) and n_used > S * n:  # one token each, in scattered blocks: a batch, with copies of keys
        positions, index = input_positions[:, None], m.block_tables.clamp(min=0)
        first = m.first_positions(block_size)
        keys = Keys((first[..., None] + torch.arange(block_size, device=first.device)).flatten(-2))
    else:  # all tokens are one batch row, over the keys of all requests
        positions = input_positions[None]
        index, keys = keys_of_all_blocks(m, len(input_positions), ends, block_size, n_used)
    layers = LayerList(kv_caches, Placement(positions, rows, index, keys, written))
    return logits_of(model, input_ids.view(positions.shape), layers.hiding() if hiding else layers,
                     ends - 1 if wanted is None else torch.tensor(wanted))


def check(config, input_ids, input_positions, kv_caches, m):
    """ValueError unless model, tokens, cache and metadata fit together."""
    shape = kv_caches[0].k.shape
    needed = config.n_layer, {(shape, config.n_kv_head, config.head_dim)}
    came = len(kv_caches), {(rows.shape, rows.n_head, rows.head_dim) for layer in kv_caches
                            for rows in (layer.k, layer.v)}
    if came != needed:
        raise ValueError(f"kv_caches are {came[0]} layers of ((blocks, slots), heads, head_dim) {sorted(came[1])}, and "
                         f"the model needs {needed[0]} layers of {sorted(needed[1])}: make them for this model")
    (n_blocks, block_size), N = shape, len(input_ids)
    if not m.slot_mapping.shape == input_ids.shape == input_positions.shape == (N,) or N == 0:
        raise ValueError(f"{N} tokens have {len(m.slot_mapping)} slots and {len(input_positions)} positions: "
                         "one slot and one position are needed for each token")
    if m.block_tables.dim() != 2 or not m.query_lens.shape == m.seq_lens.shape == m.block_tables.shape[:1]:
        raise ValueError(f"{len(m.query_lens)} query_lens and {len(m.seq_lens)} seq_lens came with block tables "
                         f"{tuple(m.block_tables.shape)}: for S requests they must be (S,), (S,) and (S, n)")
    first = m.first_positions(block_size)
    if first.shape not in (m.block_tables.shape, m.block_tables.shape[1:]):
        raise ValueError(f"block_numbers are {tuple(first.shape)}: give one for each entry of the block tables, "
                         f"{tuple(m.block_tables.shape)}")
    positions, slots = input_positions.tolist(), m.slot_mapping.tolist()
    expected_positions, expected_slots = [], []
    of_tables = first.expand_as(m.block_tables).tolist()
    for table, of_table, new, length in zip(m.block_tables.tolist(), of_tables, m.query_lens.tolist(),
                                            m.seq_lens.tolist()):
        if not 1 <= new <= length <= config.max_positions:
            raise ValueError(f"a request has {new} new tokens of {length}: it must have at least one new token, and at "
                             f"most {config.max_positions} in all")
        used = [(p // block_size, block) for p, block in zip(of_table, table) if p < length and block != -1]
        blocks = dict(used)
        needed = needed_blocks(length - new, length, block_size, config.window, config.n_sink)
        fits = len(set(blocks.values())) == len(blocks) == len(used) and blocks.keys() >= {*needed[0], *needed[1]}
        if not fits or not all(0 <= block < n_blocks for block in (*blocks.values(), max(table))):
            raise ValueError(f"the block table {table} has no room for {length} tokens: it needs "
                             f"{len(needed[0]) + len(needed[1])} different blocks of {block_size}, from 0 to "
                             f"{n_blocks - 1}")
        expected_positions += range(length - new, length)
        expected_slots += [blocks[p // block_size] * block_size + p % block_size for p in range(length - new, length)]
    n = len(expected_slots)
    if n > N or positions[:n] != expected_positions or not all(0 <= p < config.max_positions for p in positions):
        raise ValueError(f"positions {positions} are not those of the last tokens of requests: {expected_positions}")
    padded_right = all(slot == -1 for slot in slots[n:])
    if not padded_right or any(slot not in (-1, expected) for slot, expected in zip(slots, expected_slots)):
        raise ValueError(f"slots {slots} are not those of the block tables, {expected_slots}, and -1 for padding")
    if len(set(expected_slots)) < n:
        raise ValueError(f"two requests write one slot, {expected_slots}: give each its own blocks to write to")


def keys_of_all_blocks(m, N, ends, block_size, n_used):
    """
    For a pass in which all N tokens are one batch row: the index of what is read, see `Rows.read`, and its `Keys`.

    A block that several requests share is read once. If at least half of the first n_used blocks of the pool are in
    use, they are read in place.
    """
    S, device = len(m.block_tables), m.block_tables.device
    first_positions = m.first_positions(block_size).expand_as(m.block_tables)
    request, nth = ((first_positions < m.seq_lens[:, None]) & (m.block_tables >= 0)).nonzero(as_tuple=True)
    blocks = m.block_tables[request, nth]
    if n_used <= 2 * len(blocks):
        index, n_blocks, place = n_used, n_used, blocks
    else:
        distinct, place = blocks.unique(return_inverse=True)
        index, n_blocks = distinct[None], len(distinct)
    first = torch.full((S, n_blocks), NOWHERE, device=device)  # the first position that a request has in a block
    first[request, place] = first_positions[request, nth]
    key_pos = (first[..., None] + torch.arange(block_size, device=device)).flatten(1)  # (S, K), of each request
    if S < N:  # (N, K), of each token's request
        key_pos = key_pos[torch.searchsorted(ends, torch.arange(N, device=device), right=True).clamp(max=S - 1)]
    return index, Keys(key_pos[None])
