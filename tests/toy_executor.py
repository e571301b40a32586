"""
An executor for tests of scheduling, whose slots hold tokens. It asserts every read. Its logits are a function of all
tokens and of the weights: a sequence that was given anything of another one draws other tokens than alone.
"""
import math
from contextlib import nullcontext

import numpy as np
import torch

from decode.batch import NotNumbers, SequenceOutput
from decode.draw import draw
from decode.eager import drawn
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


class ToyExecutor:
    """
    pool: set it for the assertion that no written slot is in a shared page. fails: called with the new tokens of each
    step, a list of lists; it may raise. calls: these lists. version: the first weight, at the last `refresh`.
    """
    name, type_kv, torch_on_one_thread = 'the toy', 'float32', nullcontext

    def __init__(self, model):
        self.model, self.pool, self.calls, self.layers = model, None, [], ()
        self.fails = lambda texts: None
        self.refresh()

    def refresh(self):
        self.version = round(next(self.model.parameters()).flatten()[0].item() * 100)

    def hold(self, layers):
        self.layers, self.slots = layers, layers[0].k.data[0]
        self.slots.fill_(math.nan)  # nothing may be read before it is written

    def execute_model(self, batch):
        batch.make_copies(self.layers)
        if not batch.decodes:
            logits = self.one_step(batch.sequences, batch.counts, batch.tokens, batch.positions)
            rows, parts = batch.rows()
            return batch.result(logits[rows], parts, drawn)
        outputs, tokens = [SequenceOutput([], []) for _ in batch.sequences], batch.tokens.copy()
        going, n = list(range(len(outputs))), 0
        while going:
            logits = self.one_step([batch.sequences[i] for i in going], [1] * len(going), tokens[going],
                                   batch.positions[going] + n)
            for i, row in zip(going, logits):
                s, of_s = batch.sequences[i], outputs[i]
                s.settings.count(s.tokens[s.n_prompt:] + of_s.tokens)
                tokens[i] = draw(row[None], [s.settings], [s.n_drawn + n])
                of_s.tokens.append(int(tokens[i]))
                of_s.logits.append(row)
            n += 1
            ended = any(tokens[i] in batch.sequences[i].settings.stop_ids for i in going)
            going = [] if ended or batch.is_late() else [i for i in going if n < batch.n_steps[i]]
        return [SequenceOutput(of_s.tokens, torch.stack(of_s.logits) if keep else None)
                for of_s, keep in zip(outputs, batch.logprobs)]

    def one_step(self, sequences, counts, tokens, positions):
        """The logits of all new tokens, float32 (N, vocab_size)."""
        ends = np.cumsum(counts)
        texts, starts = [part.tolist() for part in np.split(tokens, ends[:-1])], positions[ends - counts].tolist()
        tables = [{p + i: slot + i for p, slot, n in s.runs.table[:s.runs.n].tolist() for i in range(n)}
                  for s in sequences]
        written = {}
        for i, (text, start, table) in enumerate(zip(texts, starts, tables)):
            for p in range(start, start + len(text)):
                assert table[p] not in written, "two sequences write one slot"
                written[table[p]] = i
                if self.pool is not None:
                    references = self.pool.references[table[p] // self.pool.page_size]
                    assert references == 1, f"a slot is written in a page with {references} references"
        self.calls.append(texts)
        rows = []
        for i, (text, start, table) in enumerate(zip(texts, starts, tables)):
            rows += self.read_and_write(i, text, start, table, written)
        self.fails(texts)  # after the writes, as a step that fails in the middle
        logits = torch.from_numpy(np.stack([logits_of_chain(row, self.model.config.vocab_size) for row in rows]))
        return self.checked(logits)

    def checked(self, logits):
        if not logits.isfinite().all():
            raise NotNumbers
        return logits

    def read_and_write(self, i, text, start, table, written):
        c, chains = self.model.config, []
        for p, token in enumerate(text, start):
            first = max(c.n_sink, p - c.window + 1) if c.window else 0
            before = 0
            for q in [*range(min(c.n_sink, p)), *range(first, p)]:
                assert written.get(table[q], i) == i, "a sequence reads what another one writes"
                seen = self.slots[table[q]].tolist()
                assert seen[POSITION] == q, f"position {q} reads a slot with position {seen[POSITION]}"
                assert seen[VERSION] == self.version, "a key of old weights is read"
                if q and (q - 1 >= first or q - 1 < c.n_sink):
                    assert seen[CHAIN] == chained(before, int(seen[TOKEN]), self.version), "another text is read"
                before = int(seen[CHAIN])
            chains.append(chained(before, token, self.version))
            self.slots[table[p], :4] = torch.tensor([token, p, chains[-1], self.version], dtype=torch.float32)
        return chains


class NextLetter(ToyExecutor):
    """The likeliest token, by far, is the one after the last one. A call makes one step, and reads nothing."""

    def execute_model(self, batch):
        self.fails([part.tolist() for part in np.split(batch.tokens, np.cumsum(batch.counts)[:-1])])
        (rows, parts), V = batch.rows(), self.model.config.vocab_size
        ids = torch.from_numpy(batch.tokens)
        logits = torch.full((len(rows), V), -1000.0).scatter_(1, (ids[rows, None] + 1) % V, 0.0)
        return batch.result(logits, parts, drawn)


class Saying(ToyExecutor):
    """Each sequence draws the tokens `says`, one after the other, and then the last one of them again and again."""
    says = (0,)

    def execute_model(self, batch):
        rows, parts = batch.rows()
        logits = torch.full((len(rows), self.model.config.vocab_size), -1000.0)
        for s, part in zip(batch.sequences, parts):
            if part.stop > part.start:
                logits[part.stop - 1, self.says[min(s.n_drawn, len(self.says) - 1)]] = 0.0
        return batch.result(logits, parts, drawn)


class ToyConstraint:
    """A `constraint` by `may_follow`, which it asserts of what was drawn. fails: called with that; it may raise."""

    def __init__(self, vocab_size, most=4, ends=(), fails=lambda drawn: None):
        self.vocab_size, self.most, self.ends, self.fails = vocab_size, most, ends, fails
        self.allowed, self.n_taken, self.taken = np.zeros(vocab_size // 64 + 1, np.int64), 0, []
        self.is_complete, self.error = False, None

    def for_sample(self, ends, min_tokens=0):
        new = ToyConstraint(self.vocab_size, self.most, ends, self.fails)
        new.write([new])
        return new

    def take(self, drawn):
        if self.n_taken is None:
            self.taken = []
        for token in drawn[len(self.taken):]:
            assert token in may_follow(self.taken, self.vocab_size, self.most, self.ends)
            self.taken.append(token)
        self.n_taken = None
        self.fails(drawn)
        assert self.taken == drawn

    @staticmethod
    def write(constraints):
        for c in constraints:
            allowed = may_follow(c.taken, c.vocab_size, c.most, c.ends)
            c.allowed[:] = bitmap(allowed, c.vocab_size)
            c.is_complete, c.n_taken = not allowed, len(c.taken)


def may_follow(drawn, vocab_size, most, ends):
    """Two of three tokens, by the sum of those before; tokens that end a text if the sum is even; at most so many."""
    total = sum(drawn)
    return set() if len(drawn) == most else {t for t in range(vocab_size) if (t + total) % 3 and t not in ends} | (
        set() if total % 2 else {*ends})


def bitmap(tokens, vocab_size):
    """`DrawSettings.allowed` for these tokens."""
    words = [0] * (vocab_size // 64 + 1)
    for t in tokens:
        words[t // 64] |= 1 << t % 64
    return np.array(words, np.uint64).view(np.int64)
