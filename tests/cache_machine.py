"""Random operations on a cache, each checked; see test_caches.py."""
import random

import torch

from kvcache import make_cache
from kvcache.contiguous import TupleCache
from model import GPT, GPTConfig

N_SEQ, VOCAB = 5, 29
MODELS = {  # every kind of positions, with and without grouped heads, windows and sinks
    'learned': dict(), 'learned window': dict(window=5, n_sink=1), 'none': dict(position='none', n_kv_head=1),
    'rope': dict(position='rope', n_kv_head=2), 'rope window sinks': dict(position='rope', window=6, n_sink=3),
    'alibi': dict(position='alibi', gelu='tanh'), 'alibi window': dict(position='alibi', window=7, n_kv_head=2),
    'none window sinks': dict(position='none', window=20, n_sink=18),
    'llama': dict(position='rope', n_kv_head=2, norm='rms', mlp='swiglu', n_inner=40, rope_scaling=(8.0, 1.0, 4.0, 16)),
    'qwen window': dict(position='rope', window=9, norm='rms', mlp='swiglu', head_dim=16, qk_norm=True, tied=False)}


def model_of(kind, seed=0, dtype=torch.float32, **how):
    torch.manual_seed(seed)
    settings = dict(block_size=40, vocab_size=VOCAB, n_layer=2, n_head=4, n_embd=48, bias=seed % 2 == 0) | MODELS[kind]
    m = GPT(GPTConfig(**(settings | how))).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return m.to(dtype)


class Machine:
    """
    Sequences of a cache that begin, grow, fork, are cut, shifted, computed anew and freed at random, in any company.

    texts: {handle: its tokens; None in the place of those that a shift has removed others before}. judge: called with
    (handle, text, logits) behind each step. oracle: an `Oracle` that follows, or None.
    """

    def __init__(self, cache, seed, judge=None, oracle=None, cuts_windows=True, shared=()):
        self.cache, self.choose, self.judge, self.oracle = cache, random.Random(seed), judge, oracle
        self.texts, self.log, self.cuts_windows, self.shared = {}, [], cuts_windows, list(shared)
        self.most = cache.model.config.max_positions

    def run(self, n):
        actions = [self.feed] * 4 + [self.decode] * 2 + [
            self.begin, self.fork, self.cut, self.free, self.again, self.shift, self.reserve]
        for _ in range(n):
            self.choose.choice(actions)()
            check(self.cache, {handle: len(text) for handle, text in self.texts.items()})

    def some(self):
        return self.choose.choice(list(self.texts)) if self.texts else self.begin()

    def begin(self):
        if len(self.texts) < N_SEQ:
            handle = self.cache.new()
            self.texts[handle] = []
            if self.oracle:
                self.oracle.new(handle)
            return handle
        return self.choose.choice(list(self.texts))

    def fork(self, handle=None):
        handle = handle or self.some()
        if len(self.texts) < N_SEQ:
            new = self.cache.fork(handle)
            self.texts[new] = self.texts[handle][:]
            if self.oracle:
                self.oracle.fork(handle, new)

    def cut(self):
        handle = self.some()
        n = self.choose.randrange(len(self.texts[handle]) + 1)
        if self.cache.window and not self.cuts_windows:
            n = 0
        try:
            self.cache.truncate(handle, n)
        except ValueError as e:  # what the next token sees is gone: then nothing has changed
            assert self.cache.window and 'window' in str(e) and n < len(self.texts[handle])
            return
        del self.texts[handle][n:]
        if self.oracle:
            self.oracle.truncate(handle, n)

    def free(self):
        if len(self.texts) > 2:
            self.remove(self.some())

    def remove(self, handle):
        self.cache.free(handle)
        del self.texts[handle]
        if self.oracle:
            self.oracle.free(handle)

    def shift(self):
        handle, config = self.some(), self.cache.model.config
        text = self.texts[handle]
        if config.position == 'learned' or config.window or len(text) < 3 or (
                self.cache.type_kv in ('int8', 'int4') and config.position == 'rope'):
            return
        if self.choose.random() < 0.5:
            self.fork(handle)  # what moves is shared then
        n_keep = self.choose.randrange(len(text) - 1)
        n = self.choose.randint(1, len(text) - n_keep)
        self.cache.shift(handle, n_keep, n)
        self.texts[handle] = text[:n_keep] + [None] * (len(text) - n_keep - n)  # they know what is gone
        if self.oracle:
            self.oracle.shift(handle, n_keep, n)

    def reserve(self):
        """Blocks for the next tokens of some sequences, or none any more. Other caches make the same choices."""
        if self.texts:
            handles, n = self.choose.sample(list(self.texts), self.choose.randint(1, len(self.texts))), 0
            for n in (self.choose.choice([0, 0, 1, 3, 40]), self.choose.choice([0, 1, 9])):
                n = min([n] + [self.most - len(self.texts[handle]) for handle in handles])
                assert not hasattr(self.cache, 'reserve') or 0 <= self.cache.reserve(handles, n) <= n

    def again(self):
        """Compute the text of a sequence anew, from 0 on."""
        handle = self.some()
        text = self.texts[handle]
        if text and None not in text:
            self.step({handle: text}, {handle: 0})

    def feed(self):
        """New tokens of some sequences, of different numbers. Sequences that are full are freed."""
        new = {}
        self.some()
        for handle in self.choose.sample(list(self.texts), self.choose.randint(1, len(self.texts))):
            begun = self.shared[:self.choose.choice([0, 16, 20])] if not self.texts[handle] else []
            n = min(self.choose.choice([1, 1, 2, 5, 16, 23]), self.most - len(self.texts[handle]) - len(begun))
            if n > 0:
                new[handle] = begun + [self.choose.randrange(VOCAB) for _ in range(n)]
            else:
                self.remove(handle)
        if new:
            self.step(new)

    def decode(self):
        """Some steps of one more token of the same sequences."""
        n = self.choose.randint(1, 6)
        handles = [handle for handle, text in self.texts.items() if 0 < len(text) <= self.most - n]
        for _ in range(n):
            if handles:
                self.step({handle: [self.choose.randrange(VOCAB)] for handle in handles}, as_tensor=True)

    def step(self, new, starts=None, as_tensor=False):
        starts = starts or {handle: len(self.texts[handle]) for handle in new}
        tokens = torch.tensor(list(new.values())) if as_tensor else [torch.tensor(text) for text in new.values()]
        logits = self.cache.step(list(new), list(starts.values()), tokens)
        self.log.append(logits)
        for (handle, tokens), of_one in zip(new.items(), logits):
            if self.oracle:
                self.oracle.truncate(handle, starts[handle])
                expected = self.oracle.feed(handle, tokens)
                worst = 1e-10 if of_one.dtype is torch.float64 else 2e-4
                torch.testing.assert_close(of_one.double(), expected, atol=worst, rtol=worst)
            self.texts[handle] = self.texts[handle][:starts[handle]] + tokens
            if self.judge and None not in self.texts[handle]:
                self.judge(handle, self.texts[handle], of_one)

    def end(self):
        """Free everything: nothing is left."""
        for handle in self.texts:
            self.cache.free(handle)
        check(self.cache, {})


def check(cache, lengths):
    """Does a cache agree with itself, and hold these sequences and no others?"""
    assert {handle: record.length for handle, record in cache.records.items()} == lengths
    blocks, records = getattr(cache, 'blocks', None), cache.records.values()
    if hasattr(cache, 'cells') and not records:
        assert not any(cells.used() for cells in cache.cells.streams)
    if blocks:
        counted = [0] * len(blocks.references)
        for record in records:
            assert len(record.tokens) == record.length and len(record.table) * cache.page_size >= record.length
            for block in filter(lambda block: block is not None, record.table):
                counted[block] += 1
        assert counted == blocks.references
        assert {*blocks.free} == {block for block, n in enumerate(counted) if n == 0}
        assert blocks.block_with == {prefix: i for i, prefix in enumerate(blocks.prefix_of) if prefix is not None}
    rows = [record.row for record in records if getattr(record, 'row', None) is not None]
    assert len(set(rows)) == len(rows)
    if hasattr(cache, 'free_rows'):
        assert sorted(rows + cache.free_rows) == list(range(cache.n_seq))


def cache_of(kind, model, bits=0, decoder=None):
    """kind: one of kvcache.KINDS, or 'tuples' for the model's tuples, in which `stream` keeps its sequences."""
    if kind == 'tuples':
        return TupleCache(model, N_SEQ, decoder)
    return make_cache(model, kind, N_SEQ, bits, decoder)
