"""Blocks under a model: prefills and decodes in one forward pass, what is shared, and what is refused."""
import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvcache.blocks import OutOfBlocks
from kvcache.paged import InputMetadata, PagedCache, execute_model
from model import GPT, GPTConfig


def model(seed=0, **how):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**(dict(block_size=32, vocab_size=29, n_layer=2, n_head=2, n_embd=32) | how))).eval()


def full_logits(m, tokens):
    return m(torch.tensor([tokens]), use_cache=False)[0][0, 0]


def pool(m, n_blocks=16, block_size=4, kind='float32'):
    c = m.config
    return PagedCache(c.n_layer, c.n_head, c.n_embd // c.n_head, n_blocks, block_size, kind)


@torch.inference_mode()
def test_prefills_and_decodes_in_one_pass():
    m = model()
    p = pool(m)
    texts = {'a': [1, 2, 3, 4, 5, 6, 7], 'b': [9, 8], 'c': [1, 2, 3, 4, 5, 0]}
    assert p.add(m, 'a', texts['a']) == 0
    assert torch.allclose(p.run(m, ['a'])[0], full_logits(m, texts['a']), atol=1e-5)
    assert p.add(m, 'b', texts['b']) == 0 and p.add(m, 'c', texts['c']) == 4
    p.extend('a', [11])
    logits = p.run(m, ['a', 'c', 'b'])
    for row, tokens in zip(logits, (texts['a'] + [11], texts['c'], texts['b'])):
        assert torch.allclose(row, full_logits(m, tokens), atol=1e-5)
    for seq in 'abc':
        p.extend(seq, [12])
    logits = p.run(m, list('abc'))
    for row, tokens in zip(logits, (texts['a'] + [11, 12], texts['b'] + [12], texts['c'] + [12])):
        assert torch.allclose(row, full_logits(m, tokens), atol=1e-5)


@torch.inference_mode()
def test_padding_writes_nothing():
    m = model()
    p = pool(m)
    p.add(m, 'a', [3, 1, 4])
    before = [layer.k.data.clone() for layer in p.layers]
    slots = torch.tensor([*p.blocks.slots('a', 0, 3), -1, -1])
    metadata = InputMetadata(slots, torch.tensor([p.blocks.tables['a'] + [-1]]), torch.tensor([3]), torch.tensor([3]))
    logits = execute_model(m, torch.tensor([3, 1, 4, 0, 0]), torch.tensor([0, 1, 2, 0, 0]), p.layers, metadata)
    assert torch.allclose(logits[0], full_logits(m, [3, 1, 4]), atol=1e-5)
    for layer, old in zip(p.layers, before):
        changed = (layer.k.data != old).any(dim=-1).flatten().nonzero()[:, 0].tolist()
        assert changed == p.blocks.slots('a', 0, 3)


@torch.inference_mode()
def test_changed_weights_are_not_served_from_old_blocks():
    m = model()
    p = pool(m)
    tokens = list(range(9))
    p.add(m, 'a', tokens)
    p.run(m, ['a'])
    assert p.add(m, 'b', tokens) == 8
    m.lm_head.weight[3, 5] += 1
    assert p.add(m, 'c', tokens) == 0
    assert torch.allclose(p.run(m, ['c'])[0], full_logits(m, tokens), atol=1e-5)
    p.extend('a', [1])  # of the old weights, as what it goes on from; nobody else may have it
    p.run(m, ['a'])
    assert p.add(m, 'd', tokens + [1, 2, 3, 4]) == 8
    assert torch.allclose(p.run(m, ['d'])[0], full_logits(m, tokens + [1, 2, 3, 4]), atol=1e-5)


@torch.inference_mode()
def test_forks_hold_their_prompt_once():
    m = model()
    p = pool(m)
    prompt = list(range(10))
    p.add(m, 0, prompt)
    p.run(m, [0])
    for i in range(1, 5):
        p.fork(0, i)
    assert len({block for table in p.blocks.tables.values() for block in table}) == 3
    for i in range(5):
        p.extend(i, [20 + i])
    logits = p.run(m, range(5))
    for i in range(5):
        assert torch.allclose(logits[i], full_logits(m, prompt + [20 + i]), atol=1e-5)
    assert len({block for table in p.blocks.tables.values() for block in table}) == 2 + 5


@torch.inference_mode()
def test_only_what_was_computed_is_found_by_others():
    """A pass that fails, or has not been asked for yet, has computed nothing."""
    m = model()
    p, tokens = pool(m), list(range(13))
    p.add(m, 'a', tokens[:9])
    assert p.add(m, 'b', tokens) == 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr('kvcache.paged.logits_of', lambda *args, **how: 1 / 0)
        p.run(m, ['a'])
    assert p.computed == dict(a=0, b=0) and p.add(m, 'c', tokens) == 0
    p.extend('a', tokens[9:])
    assert torch.allclose(p.run(m, ['a'])[0], full_logits(m, tokens), atol=1e-5)
    assert p.computed['a'] == 13 and p.add(m, 'd', tokens) == 12
    p.truncate('a', 6)
    p.extend('a', [20, 21])
    assert p.computed['a'] == 6 and torch.allclose(p.run(m, ['a'])[0], full_logits(m, tokens[:6] + [20, 21]), atol=1e-5)
    for seqs in (['a'], ['nobody'], ['b', 'a']):
        with pytest.raises(ValueError, match='not computed yet'):
            p.run(m, seqs)


@torch.no_grad()
def test_what_was_begun_with_other_weights_is_not_found():
    """a's first tokens are of one, the others of another. That the first come back later, as if nothing had been, does not make it right."""
    m = model()
    p, tokens = pool(m), list(range(9))
    p.add(m, 'a', tokens[:3])
    p.run(m, ['a'])
    first, m.lm_head.weight.data = m.lm_head.weight.data, m.lm_head.weight + 1
    p.extend('a', tokens[3:8])
    p.run(m, ['a'])
    m.lm_head.weight.data = first
    assert p.add(m, 'b', tokens) == 0


class PagedMachine(RuleBasedStateMachine):
    """Random requests on a model, beside {sequence: its tokens}: what a pass answers is what all tokens of each give alone, uncached."""

    def __init__(self):
        super().__init__()
        self.gpt, self.names, self.texts = model(), 0, {}
        self.pool = pool(self.gpt, n_blocks=12, block_size=3)

    def any(self, data):
        return data.draw(st.sampled_from(sorted(self.texts)))

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)  # few enough for prompts to begin alike

    @rule(tokens=tokens)
    def add(self, tokens):
        try:
            n_cached = self.pool.add(self.gpt, self.names, tokens)
        except OutOfBlocks:
            return
        assert n_cached < len(tokens)
        self.texts[self.names] = tokens
        self.names += 1

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=tokens)
    def extend(self, data, tokens):
        seq = self.any(data)
        if len(self.texts[seq]) + len(tokens) <= 32:
            try:
                self.pool.extend(seq, tokens)
            except OutOfBlocks:
                return
            self.texts[seq] = self.texts[seq] + tokens

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.any(data)
        try:
            self.pool.fork(seq, self.names)
        except OutOfBlocks:
            assert self.pool.computed[seq] < len(self.texts[seq])  # what is computed costs none
            return
        self.texts[self.names] = self.texts[seq]
        self.names += 1

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), part=st.floats(0, 1))
    def cut(self, data, part):
        seq = self.any(data)
        n = max(1, int(part * len(self.texts[seq])))
        self.pool.truncate(seq, n)
        self.texts[seq] = self.texts[seq][:n]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def remove(self, data):
        seq = self.any(data)
        self.pool.remove(seq)
        del self.texts[seq]

    @rule(seed=st.integers(0, 3))
    def train(self, seed):
        """Other weights: what goes on from now on is of both, so that nobody can say what it should be."""
        for seq in list(self.texts):
            self.pool.remove(seq)
        self.texts = {}
        self.gpt.load_state_dict(model(seed).state_dict())

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    @torch.inference_mode()
    def run(self, data):
        ready = [seq for seq in self.texts if self.pool.computed[seq] < len(self.texts[seq])]
        seqs = [seq for seq in ready if data.draw(st.booleans())]
        if seqs:
            for row, seq in zip(self.pool.run(self.gpt, seqs), seqs):
                assert torch.allclose(row, full_logits(self.gpt, self.texts[seq]), atol=1e-5)

    def teardown(self):
        for seq in self.texts:
            self.pool.remove(seq)
        assert len(self.pool.blocks.free) == 12 and not self.pool.tokens and not self.pool.computed


TestPaged = PagedMachine.TestCase
TestPaged.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


METADATA = dict(slot_mapping=[0, 1, 2, 8], block_tables=[[0, -1], [1, 2]], query_lens=[3, 1], seq_lens=[3, 5])


@pytest.mark.parametrize('words, changed', [
    ('slots', dict(slot_mapping=[0, 1, 2, 64])), ('slots', dict(slot_mapping=[0, 1, 2, -2])), ('one slot', dict(slot_mapping=[0, 1, 2])),
    ('slots', dict(slot_mapping=[0, 1, 2, 9])), ('slots', dict(slot_mapping=[0, 0, 0, 8])),
    ('slots', dict(block_tables=[[0, -1]], query_lens=[3], seq_lens=[3])),  # what is left is padding, and would be written
    ('room', dict(block_tables=[[0, -1], [1, -1]])), ('room', dict(block_tables=[[0, -1], [1, 16]])), ('room', dict(block_tables=[[0], [1]])),
    ('room', dict(block_tables=[[-1, -1], [1, 2]])), ('room', dict(block_tables=[[0, -1], [2, 2]])), ('block tables', dict(block_tables=[0, 1])),
    ('one slot', dict(block_tables=[[0, -1], [0, -1]], seq_lens=[3, 3], slot_mapping=[0, 1, 2, 2], positions=[0, 1, 2, 2])),
    ('new token', dict(query_lens=[4, 0])), ('positions', dict(query_lens=[3, 2])), ('query_lens', dict(query_lens=[4])),
    ('new token', dict(seq_lens=[2, 5])), ('new token', dict(seq_lens=[3, 33])), ('seq_lens', dict(seq_lens=[3])),
    ('positions', dict(positions=[0, 1, 2, 32])), ('positions', dict(positions=[0, 1, 2, -1])), ('one slot', dict(positions=[0, 1, 2])),
    ('positions', dict(positions=[0, 1, 2, 3])), ('positions', dict(positions=[5, 6, 7, 4])), ('token ids', dict(ids=[5, 6, 7, 29])),
    ('token ids', dict(ids=[5, 6, 7, -1])),
])
@torch.inference_mode()
def test_metadata_that_does_not_go_together_is_refused_and_nothing_is_written(words, changed):
    m = model()
    p = pool(m)

    def call(ids=(5, 6, 7, 8), positions=(0, 1, 2, 4), **metadata):
        return execute_model(m, torch.tensor(ids), torch.tensor(positions), p.layers,
                             InputMetadata(**{name: torch.tensor(value) for name, value in metadata.items()}))
    with pytest.raises(ValueError, match=words):
        call(**(METADATA | changed))
    assert not any(layer.k.data.any() for layer in p.layers)
    for other in (pool(model(n_layer=3)), pool(model(n_embd=64)), pool(m, block_size=8)):
        with pytest.raises(ValueError, match='layers alike'):
            execute_model(m, torch.tensor([5]), torch.tensor([0]), [p.layers[0], *other.layers[1:]],
                          InputMetadata(torch.tensor([0]), torch.tensor([[0]]), torch.tensor([1]), torch.tensor([1])))
    assert call(**METADATA).shape == (2, 29)


@torch.inference_mode()
def test_dropout_does_not_get_into_the_pool():
    m = model(dropout=0.5)
    p = pool(m)
    p.add(m, 'a', torch.arange(9))  # tokens of any kind
    m.train()
    with pytest.raises(ValueError, match='eval'):
        p.run(m, ['a'])
    m.eval()
    assert torch.allclose(p.run(m, ['a'])[0], full_logits(m, list(range(9))), atol=1e-5) and p.add(m, 'b', torch.arange(9)) == 8
    p.add(m, 'wrong', [1, 29])
    for refused in (lambda: p.run(m, ['wrong']), lambda: p.run(m, []), lambda: p.extend('c', [1]), lambda: p.fork('c', 'd'),
                    lambda: p.remove('c'), lambda: p.truncate('c', 1)):
        with pytest.raises(ValueError):
            refused()


@torch.inference_mode()
def test_two_models_do_not_share():
    m, other = model(), model(1)
    p, tokens = pool(m), list(range(9))
    p.add(m, 'a', tokens[:5])
    p.run(m, ['a'])
    for runs, part in ((other, tokens[5:7]), (m, tokens[7:])):
        p.extend('a', part)
        p.run(runs, ['a'])
    assert p.add(m, 'b', tokens) == 0


@torch.inference_mode()
def test_a_fork_of_tokens_that_are_not_computed_shares_none_of_their_blocks():
    """
    Each of the two will write them: in a block that both have, one would write over what the other has gone on with.
    """
    for n_prompt, n_computed in itertools.product(range(1, 11), range(10)):
        m = model()
        p, tokens = pool(m), list(range(n_prompt))
        if n_computed < n_prompt:
            p.add(m, 'a', tokens[:n_computed or n_prompt])
            if n_computed:
                p.run(m, ['a'])
                p.extend('a', tokens[n_computed:])
            p.fork('a', 'b')
            shared = set(p.blocks.tables['a']) & set(p.blocks.tables['b'])
            assert shared == set(p.blocks.tables['a'][:n_computed // 4]) and p.computed == dict(a=n_computed, b=n_computed)
            p.extend('b', [21])
            p.extend('a', [22])
            assert torch.allclose(p.run(m, ['b'])[0], full_logits(m, tokens + [21]), atol=1e-5)
            assert torch.allclose(p.run(m, ['a'])[0], full_logits(m, tokens + [22]), atol=1e-5)
            p.extend('b', [23])
            assert torch.allclose(p.run(m, ['b'])[0], full_logits(m, tokens + [21, 23]), atol=1e-5)
            for seq in 'ab':
                p.remove(seq)
            assert len(p.blocks.free) == 16


def test_a_fork_with_no_room_for_its_own_tokens_changes_nothing():
    m = model()
    p = pool(m, n_blocks=3)
    p.add(m, 'a', list(range(9)))
    with pytest.raises(OutOfBlocks):
        p.fork('a', 'b')
    assert p.tokens.keys() == p.computed.keys() == p.blocks.tables.keys() == p.blocks.length.keys() == {'a'} and not p.blocks.free
    p.remove('a')
    assert len(p.blocks.free) == 3


def copied_in(m, other):
    for p, q in zip(m.parameters(), other.parameters()):
        p.data.copy_(q)


def permuted(m):
    """The rows of each matrix in the opposite order."""
    for p in m.parameters():
        if p.dim() == 2:
            p.data.copy_(p.data.flip(0))


@torch.inference_mode()
def test_blocks_computed_with_weights_that_were_swapped_in_and_out_are_not_found():
    """As an exponential moving average is: copied in through .data, and back, between two steps."""
    m, average, tokens = model(), model(1), list(range(13))
    kept = model()
    p = pool(m)
    p.add(m, 'a', tokens[:7])
    p.run(m, ['a'])
    copied_in(m, average)
    p.extend('a', tokens[7:12])  # the block of tokens 4 to 7, and that of 8 to 11
    p.run(m, ['a'])
    copied_in(m, kept)
    assert p.add(m, 'b', tokens) == 0
    assert torch.allclose(p.run(m, ['b'])[0], full_logits(m, tokens), atol=1e-5)
    p.extend('a', tokens[12:] + [1, 2, 3])
    p.run(m, ['a'])  # of both weights, and nobody may find it
    assert p.add(m, 'c', tokens + [1, 2, 3, 4]) == 12
    assert torch.allclose(p.run(m, ['c'])[0], full_logits(m, tokens + [1, 2, 3, 4]), atol=1e-5)


@torch.inference_mode()
def test_blocks_computed_while_any_parameter_differs_are_not_found():
    """
    Not only the last one: each of them, changed where torch counts it, or replaced, before a pass and back after it,
    or during it.
    """
    for name, _ in model().named_parameters():
        m, tokens = model(), list(range(9))
        p, owner = pool(m), m.get_submodule(name.rpartition('.')[0])
        p.add(m, 'a', tokens[:7])
        p.run(m, ['a'])
        first = getattr(owner, name.rpartition('.')[2])
        setattr(owner, name.rpartition('.')[2], torch.nn.Parameter(first * 1.5 + 1))
        p.extend('a', tokens[7:])
        p.run(m, ['a'])
        setattr(owner, name.rpartition('.')[2], first)
        assert p.add(m, 'b', tokens) == 0, name
    m = model()
    p = pool(m)
    p.add(m, 'a', list(range(9)))
    hook = m.transformer.h[0].register_forward_hook(lambda *_: m.transformer.wpe.weight.add_(1.0) is None or None)
    p.run(m, ['a'])
    hook.remove()
    assert p.add(m, 'b', list(range(9))) == 0


@torch.inference_mode()
def test_pages_of_permuted_weights_are_not_shared():
    """A permutation through .data keeps every sum of the weights, and all of torch's counts."""
    m, tokens = model(), list(range(9))
    p = pool(m)
    p.add(m, 'a', tokens)
    p.run(m, ['a'])
    permuted(m)
    assert p.add(m, 'b', tokens) == 0
    assert torch.allclose(p.run(m, ['b'])[0], full_logits(m, tokens), atol=1e-5)


@torch.inference_mode()
def test_execute_model_is_not_disturbed_by_huge_keys_in_the_blocks_of_others():
    m = model()
    m.transformer.h[0].attn.c_attn.bias[:32] = 30.0
    for n_new in (1, 3):
        p = pool(m)
        for layer in p.layers:  # as finite numbers that broken weights left
            layer.k.data.fill_(1e38)
            layer.v.data.fill_(-1e38)
        tokens = dict(a=[1, 2, 3, 4, 5, 6], b=[7, 8, 9])
        for seq, mine in tokens.items():
            p.add(m, seq, mine)
        for row, mine in zip(p.run(m, list(tokens)), tokens.values()):
            assert torch.allclose(row, full_logits(m, mine), atol=1e-5)
        for seq in tokens:
            p.extend(seq, list(range(10, 10 + n_new)))
        for row, mine in zip(p.run(m, list(tokens)), tokens.values()):
            assert torch.allclose(row, full_logits(m, mine + list(range(10, 10 + n_new))), atol=1e-5)
