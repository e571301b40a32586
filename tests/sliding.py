"""Small models whose positions slide, caches fed with them beside the logits of one pass, and keys turned by hand."""

import itertools

import torch

from generation import Work
from kvcache import make_cache
from kvcache.paged import PagedCache, n_blocks_for
from model import GPT, GPTConfig
from positions import Keys

BLOCK, VOCABULARY = 16, 29
SHAPES = dict(block_size=BLOCK, vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=32)


def model(dtype=torch.float64, **how):
    torch.manual_seed(0)
    m = GPT(GPTConfig(**(SHAPES | how))).to(dtype).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return m


def texts(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def all_logits(m, idx):
    """Logits (B, T, vocab_size) of all positions of idx (B, T), read at once."""
    return m(idx, targets=idx, use_cache=False)[0]


def small_cache(m, kind, n_seq):
    """`make_cache` of a float64 model, with pages of 4 positions."""
    if kind == 'paged':
        return PagedCache(m, n_seq * n_blocks_for(m.config, 4), 4, 'float64')
    return make_cache(m, kind, n_seq)


def feed(cache, seqs, tokens):
    """A step of these sequences, from where they end."""
    return cache.step(Work(seqs, [cache.lengths[seq] for seq in seqs], tokens))


def join_and_leave(cache, idx, exact, ends, lengths, rng):
    """
    Four sequences with the texts idx (4, T) join a cache one after the other, the last one as a fork of the first, and
    each is freed at its end. Yields, for each step, (sequences, their next tokens, the exact logits of the last of
    these); the caller feeds them. lengths: of the chunks, drawn at random.
    """
    seqs = {}
    for step in itertools.count():
        if step in (0, 1, 3):
            seqs[len(seqs)] = cache.new()
        if step == 4:
            idx[3], exact[3] = idx[0], exact[0]
            seqs[3] = cache.fork(seqs[0])
        for row in [row for row in seqs if cache.lengths[seqs[row]] == ends[row]]:
            cache.free(seqs.pop(row))
        if not seqs:
            return
        live = [row for row in seqs if rng.random() < 0.8] or [*seqs]
        starts = [cache.lengths[seqs[row]] for row in live]
        stops = [min(ends[row], start + int(rng.choice(lengths))) for row, start in zip(live, starts)]
        tokens = [idx[row, start:stop] for row, start, stop in zip(live, starts, stops)]
        yield [seqs[row] for row in live], tokens, [exact[row, stop - 1] for row, stop in zip(live, stops)]


def in_chunks(cache, seq, idx, chunks, exact):
    """Feed idx (T,) to a sequence in chunks; the logits after each are exact (T, vocab_size)."""
    for n in chunks:
        start = cache.lengths[seq]
        logits = feed(cache, [seq], idx[None, start:start + n])[0]
        assert (logits - exact[start + n - 1]).abs().max() < 1e-10, (start, n)


W, SINKS = 5, 2


def streaming(kind, n_seq=2, **how):
    m = model(**(dict(position='rope', n_kv_head=2, window=W, n_sink=SINKS) | how))
    idx = texts(10 * BLOCK)
    return m, idx, all_logits(m, idx[None])[0], small_cache(m, kind, n_seq)


class ShiftedKeys(list):
    """The layers of a cache of one sequence that keeps all keys and values, and can give them other positions."""

    def __init__(self, m):
        super().__init__(ShiftedLayer(m.config) for _ in range(m.config.n_layer))
        self.model = m

    def feed(self, idx):
        """Logits (vocab_size,) of the last of the tokens idx (T,)."""
        start = 1 + (max(self[0].pos) if self[0].pos else -1)
        x, _ = self.model.hidden_states(idx[None], torch.arange(start, start + len(idx)), self)
        return self.model.lm_head(x)[0, -1]

    def move(self, moved):
        """moved: a function of a position; None removes it."""
        for layer in self:
            layer.move(moved)


class ShiftedLayer:
    def __init__(self, config):
        self.config, self.pos, self.k, self.v = config, [], [], []

    def append(self, k, v, positions):
        self.pos += positions.q_pos.tolist()
        self.k += k[0].unbind(1)
        self.v += v[0].unbind(1)
        return torch.stack(self.k, 1)[None], torch.stack(self.v, 1)[None], Keys(torch.tensor(self.pos)), self

    def move(self, moved):
        kept = [(moved(p), p, k, v) for p, k, v in zip(self.pos, self.k, self.v) if moved(p) is not None]
        self.pos, self.v = [new for new, *_ in kept], [v for *_, v in kept]
        self.k = [self.turned(k, new - p) for new, p, k, _ in kept]

    def turned(self, k, by):
        """A key (n_kv_head, head_dim): pairs of channels as complex numbers, times exp(i * angle)."""
        if self.config.position != 'rope':
            return k
        a, b = k.chunk(2, dim=-1)
        angle = by * self.config.rope_theta ** (-torch.arange(a.size(-1), dtype=torch.float64) / a.size(-1))
        z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), dim=-1)
