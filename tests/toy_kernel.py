"""
A kernel for tests of scheduling: its slots hold tokens in place of keys and values, and it asserts every read.

The logits of a token are a function of all tokens up to it and of the weights, so a sample that was given anything of
another one, or old weights, draws other tokens than alone.
"""
import math

import numpy as np
import torch

from model import GPT, GPTConfig

MODULUS = 2**24 - 3  # what float32 holds exactly
TOKEN, POSITION, CHAIN, VERSION = range(4)  # of the numbers that a slot holds


def toy_model(block_size=32, vocab_size=11, **how):
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=block_size, vocab_size=vocab_size, n_layer=1, n_head=1, n_embd=8, **how)).eval()


def chained(chain, token, version):
    """The number of a text: of the number of the text before its last token, that token, and the weights."""
    return (chain * 48271 + token * 7919 + version * 104729 + 1) % MODULUS


def logits_of_chain(chain, vocab_size):
    x = (chain + 1) * np.arange(1, vocab_size + 1, dtype=np.int64) * 2654435761 % 1000003
    return (x % 1000 / 200).astype(np.float32)


def chain_of(tokens, version):
    chain = 0
    for token in tokens:
        chain = chained(chain, token, version)
    return chain


class ToyKernel:
    """
    A decoder for `PagedCache`. cache: its cache, for the assertion that no written slot is in a shared block.
    fails: called with the tokens of each step, a list of lists; it may raise. calls: these lists.

    Whoever changes `version` changes the weights. The first call that ends after that may read old keys, and has other
    logits then; later ones may not.
    """
    name = 'the toy kernel'

    def __init__(self, model):
        self.model, self.version, self.cache, self.calls, self.last_version = model, 1, None, [], 1
        self.fails = lambda texts: None

    def notice_changes(self, thorough=False):
        pass

    def reads(self, kv_caches):
        return True

    def execute_model(self, input_ids, input_positions, kv_caches, input_metadata):
        several, n_steps = input_metadata.next_tokens, 1
        logits = self.one_step(input_ids, input_positions, kv_caches, input_metadata)
        while several and bool(logits.isfinite().all()):
            several.draw_from(logits)
            if several.ended or n_steps == several.n_steps:
                break
            input_ids = torch.from_numpy(several.tokens[several.n_drawn])
            logits = self.one_step(input_ids, input_positions + n_steps, kv_caches, input_metadata)
            n_steps += 1
        kv_caches.finite, self.last_version = bool(logits.isfinite().all()), self.version
        return logits

    def one_step(self, input_ids, input_positions, kv_caches, input_metadata):
        m, c = input_metadata, self.model.config
        texts = [text.tolist() for text in input_ids.split(m.query_lens)]
        starts = [int(p) for p in input_positions[np.cumsum([0, *m.query_lens[:-1]])]]
        slots, rows, written = kv_caches.tensors[0][0].view(kv_caches.n_slots, -1), [], {}
        tables = [{p + i: s + i for p, s, n in runs.table[:runs.n].tolist() for i in range(n)} for runs in m.runs]
        for i, (text, start, table) in enumerate(zip(texts, starts, tables)):
            for p in range(start, start + len(text)):
                assert table[p] not in written, "two samples write one slot"
                written[table[p]] = i
                if self.cache is not None:
                    references = self.cache.blocks.references[table[p] // self.cache.page_size]
                    assert references == 1, f"a slot is written in a block with {references} references"
        self.calls.append(texts)
        for i, (text, start, table) in enumerate(zip(texts, starts, tables)):
            rows += self.read_and_write(i, text, start, table, slots, written)
        self.fails(texts)  # after the writes, as a kernel that fails in the middle
        wanted = m.wanted if m.wanted is not None else np.cumsum(m.query_lens) - 1
        return torch.from_numpy(np.stack([logits_of_chain(rows[i], c.vocab_size) for i in wanted]))

    def read_and_write(self, i, text, start, table, slots, written):
        c, chains = self.model.config, []
        for p, token in enumerate(text, start):
            first = max(c.n_sink, p - c.window + 1) if c.window else 0
            before = 0
            for q in [*range(min(c.n_sink, p)), *range(first, p)]:
                assert written.get(table[q], i) == i, "a sample reads what another one writes"
                seen = slots[table[q]].tolist()
                assert seen[POSITION] == q, f"position {q} reads a slot with position {seen[POSITION]}"
                old = seen[VERSION] != self.version
                assert not old or self.last_version != self.version, "a key of old weights is read"
                if not old and q and (q - 1 >= first or q - 1 < c.n_sink):
                    expected = chained(before, int(seen[TOKEN]), self.version)
                    assert seen[CHAIN] == expected, "another text is read"
                before = int(seen[CHAIN])
            chains.append(chained(before, token, self.version))
            slots[table[p], :4] = torch.tensor([token, p, chains[-1], self.version], dtype=torch.float32)
        return chains


class NextLetter(ToyKernel):
    """The likeliest token, by far, is the one behind the last one. A call makes one step, and reads nothing."""

    def execute_model(self, input_ids, input_positions, kv_caches, input_metadata):
        m, V = input_metadata, self.model.config.vocab_size
        self.fails([text.tolist() for text in input_ids.split(m.query_lens)])
        rows = torch.from_numpy(m.wanted if m.wanted is not None else np.cumsum(m.query_lens) - 1)
        kv_caches.finite = True
        return torch.full((len(rows), V), -1000.0).scatter_(1, (input_ids[rows, None] + 1) % V, 0.0)


def begin_with_nan(cache):
    """Nothing may be read before it is written."""
    for layer in cache.layers:
        for stored in layer.tensors():
            stored.fill_(math.nan)


def lengths_of(cache):
    """{sequence: how many of its tokens are in a cache}."""
    return {handle: cache.length(handle) for handle in cache.records}
