"""Blocks under a model: prompts and next tokens in one forward pass, what is shared, and what is refused."""
import pytest
import torch
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from reference_executor import ReferenceExecutor

from decode.cpu import CPUDecoder
from generation import Work
from kvcache import block_tables
from kvcache.blocks import OutOfBlocks
from kvcache.paged import PagedCache, PagedMetadata, execute_model
from kvcache.placement import logits_of
from model import GPT, GPTConfig


def model(seed=0, **how):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**(dict(block_size=32, vocab_size=29, n_layer=2, n_head=2, n_embd=32) | how))).eval()


def full_logits(m, tokens):
    return m(torch.tensor([tokens]), use_cache=False)[0][0, 0]


def pool(m, n_blocks=16, block_size=4):
    return PagedCache(m, n_blocks, block_size)


def feed(p, texts):
    """A step of {sequence: new tokens}, from where each ends: logits (B, vocab_size)."""
    return p.step(Work(list(texts), [p.lengths[seq] for seq in texts], [torch.tensor(text) for text in texts.values()]))


def begin(p, text):
    """(the number of a new sequence with this text, its logits)."""
    seq = p.new()
    return seq, feed(p, {seq: text})[0]


def n_computed(p, text):
    """How many tokens a step of a new sequence with this text computes. It is freed."""
    numbers, seq = [], p.new()
    with pytest.MonkeyPatch.context() as patch:  # a hook would change the model, and no block would be found
        patch.setattr(block_tables, 'logits_of',
                      lambda m, idx, *args: numbers.append(idx.numel()) or logits_of(m, idx, *args))
        feed(p, {seq: text})
    p.free(seq)
    return numbers[-1]


@torch.inference_mode()
def test_prompts_and_next_tokens_in_one_pass():
    m = model()
    p, passes = pool(m), []
    m.transformer.ln_f.register_forward_hook(lambda *_: passes.append(1))
    texts = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [1, 2, 3, 4, 5, 0]]
    a, logits = begin(p, texts[0])
    assert torch.allclose(logits, full_logits(m, texts[0]), atol=1e-5)
    b, c = p.new(), p.new()
    logits = feed(p, {a: [11], c: texts[2], b: texts[1]})
    for row, tokens in zip(logits, (texts[0] + [11], texts[2], texts[1])):
        assert torch.allclose(row, full_logits(m, tokens), atol=1e-5)
    passes.clear()
    assert p.blocks.tables[a][0] == p.blocks.tables[c][0]  # the first four tokens of c were not computed
    logits = feed(p, {a: [12], b: [12], c: [12]})
    assert len(passes) == 1
    for row, tokens in zip(logits, (texts[0] + [11, 12], texts[1] + [12], texts[2] + [12])):
        assert torch.allclose(row, full_logits(m, tokens), atol=1e-5)


@pytest.mark.parametrize('decoder_of', [lambda m: m, ReferenceExecutor, CPUDecoder], ids=['model', 'reference', 'cpu'])
@torch.inference_mode()
def test_padding_writes_nothing(decoder_of):
    m = model()
    p, ids = pool(m), torch.tensor([3, 1, 4, 0, 0])
    slots = p.blocks.add('a', [3, 1, 4]) or p.blocks.slots('a', 0, 3)
    before = [layer.k.data.clone() for layer in p.layers]
    metadata = PagedMetadata(torch.tensor([*slots, -1, -1]), torch.tensor([p.blocks.tables['a'] + [-1]]),
                             torch.tensor([3]), torch.tensor([3]))
    logits = execute_model(decoder_of(m), ids, torch.tensor([0, 1, 2, 0, 0]), p.layers, metadata)
    assert torch.allclose(logits[0], full_logits(m, [3, 1, 4]), atol=1e-5)
    for layer, old in zip(p.layers, before):
        assert (layer.k.data != old).any(dim=-1).any(dim=0).flatten().nonzero()[:, 0].tolist() == slots


@torch.inference_mode()
def test_forks_hold_their_prompt_once():
    m = model()
    p = pool(m)
    prompt = list(range(10))
    seqs = [begin(p, prompt)[0]]
    seqs += [p.fork(seqs[0]) for _ in range(4)]
    assert len({block for table in p.blocks.tables.values() for block in table}) == 3
    for i, row in enumerate(feed(p, {seq: [20 + i] for i, seq in enumerate(seqs)})):
        assert torch.allclose(row, full_logits(m, prompt + [20 + i]), atol=1e-5)
    assert len({block for table in p.blocks.tables.values() for block in table}) == 2 + 5


@torch.inference_mode()
def test_a_fork_does_not_write_to_the_other_sequences_blocks():
    for n_prompt in range(1, 11):
        m = model()
        p, tokens = pool(m), list(range(n_prompt))
        a = begin(p, tokens)[0]
        b = p.fork(a)
        assert p.blocks.tables[a] == p.blocks.tables[b]
        for seq, new in ((b, [21]), (a, [22])):
            assert torch.allclose(feed(p, {seq: new})[0], full_logits(m, tokens + new), atol=1e-5)
        for seq, old in ((b, 21), (a, 22)):
            assert torch.allclose(feed(p, {seq: [23]})[0], full_logits(m, tokens + [old, 23]), atol=1e-5)
        assert set(p.blocks.tables[a]) & set(p.blocks.tables[b]) == set(p.blocks.tables[a][:n_prompt // 4])
        for seq in (a, b):
            p.free(seq)
        assert len(p.blocks.free) == 16


@torch.inference_mode()
def test_only_what_was_computed_is_found_by_others():
    """A step that fails has computed nothing."""
    m = model()
    p, tokens = pool(m), list(range(13))
    a = p.new()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(block_tables, 'logits_of', lambda *args, **how: 1 / 0)
        feed(p, {a: tokens[:9]})
    assert p.lengths == {a: 0} and not p.tokens and len(p.blocks.free) == 16 and not p.blocks.cached_blocks(tokens)
    feed(p, {a: tokens[:9]})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(block_tables, 'logits_of', lambda *args, **how: 1 / 0)
        feed(p, {a: tokens[9:]})
    assert p.lengths == {a: 9} and p.tokens == {a: tokens[:9]} and n_computed(p, tokens) == 5
    assert torch.allclose(feed(p, {a: tokens[9:]})[0], full_logits(m, tokens), atol=1e-5)
    assert n_computed(p, tokens) == 1
    logits = p.step(Work([a], [6], torch.tensor([[20, 21]])))
    assert p.lengths == {a: 8} and torch.allclose(logits[0], full_logits(m, tokens[:6] + [20, 21]), atol=1e-5)


class PagedMachine(RuleBasedStateMachine):
    """
    Random requests beside {sequence: its tokens}. A step's logits are those of all tokens of each, uncached and alone.
    """

    def __init__(self):
        super().__init__()
        self.gpt, self.texts = model(), {}
        self.pool = pool(self.gpt, n_blocks=12, block_size=3)

    def any(self, data):
        return data.draw(st.sampled_from(sorted(self.texts)))

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)  # few different tokens, so that prompts begin alike

    @precondition(lambda self: len(self.texts) < 12)
    @rule()
    def new(self):
        self.texts[self.pool.new()] = []

    @precondition(lambda self: 0 < len(self.texts) < 12)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.any(data)
        self.texts[self.pool.fork(seq)] = self.texts[seq]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), part=st.floats(0, 1))
    def truncate(self, data, part):
        seq = self.any(data)
        n = int(part * len(self.texts[seq]))
        self.pool.truncate(seq, n)
        self.texts[seq] = self.texts[seq][:n]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data):
        seq = self.any(data)
        self.pool.free(seq)
        del self.texts[seq]

    @rule(seed=st.integers(0, 3))
    def train(self, seed):
        """Other weights, and no sequences, because those that go on would be computed with both."""
        for seq in self.texts:
            self.pool.free(seq)
        self.texts = {}
        self.gpt.load_state_dict(model(seed).state_dict())

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    @torch.inference_mode()
    def step(self, data):
        new, starts = {}, []
        for seq in self.texts:
            if data.draw(st.booleans()):
                start = data.draw(st.integers(0, len(self.texts[seq])) | st.just(len(self.texts[seq])))
                text = data.draw(self.tokens)
                if start + len(text) <= 32:
                    new[seq] = text
                    starts.append(start)
        if not new:
            return
        for seq, start in zip(new, starts):
            self.texts[seq] = self.texts[seq][:start]
        try:
            logits = self.pool.step(Work(list(new), starts, [torch.tensor(text) for text in new.values()]))
        except OutOfBlocks:
            return
        for seq, row in zip(new, logits):
            self.texts[seq] = self.texts[seq] + new[seq]
            assert torch.allclose(row, full_logits(self.gpt, self.texts[seq]), atol=1e-5)

    @invariant()
    def lengths_tokens_and_tables_agree(self):
        assert self.pool.lengths == {seq: len(text) for seq, text in self.texts.items()}
        begun = {seq: text for seq, text in self.texts.items() if text}
        assert self.pool.tokens == begun and self.pool.blocks.length == {seq: len(text) for seq, text in begun.items()}

    def teardown(self):
        for seq in self.texts:
            self.pool.free(seq)
        assert len(self.pool.blocks.free) == 12 and not self.pool.tokens and not self.pool.lengths


TestPaged = PagedMachine.TestCase
TestPaged.settings = settings(max_examples=sizes(15, 60), stateful_step_count=40, deadline=None)


METADATA = dict(slot_mapping=[0, 1, 2, 8], block_tables=[[0, -1], [1, 2]], query_lens=[3, 1], seq_lens=[3, 5])


@pytest.mark.parametrize('words, changed', [
    ('slots', dict(slot_mapping=[0, 1, 2, 64])), ('slots', dict(slot_mapping=[0, 1, 2, -2])),
    ('slots', dict(slot_mapping=[0, 1, 2, 9])), ('slots', dict(slot_mapping=[0, 0, 0, 8])),
    ('slots', dict(block_tables=[[0, -1]], query_lens=[3], seq_lens=[3])),  # the last token is padding, and has a slot
    ('one slot', dict(slot_mapping=[0, 1, 2])), ('one slot', dict(positions=[0, 1, 2])),
    ('one slot', dict(block_tables=[[0, -1], [0, -1]], seq_lens=[3, 3], slot_mapping=[0, 1, 2, 2],
                      positions=[0, 1, 2, 2])),
    ('room', dict(block_tables=[[0, -1], [1, -1]])), ('room', dict(block_tables=[[0, -1], [1, 16]])),
    ('room', dict(block_tables=[[-1, -1], [1, 2]])), ('room', dict(block_tables=[[0, -1], [2, 2]])),
    ('room', dict(block_tables=[[0], [1]])), ('block tables', dict(block_tables=[0, 1])),
    ('query_lens', dict(query_lens=[4])), ('seq_lens', dict(seq_lens=[3])), ('new token', dict(query_lens=[4, 0])),
    ('new token', dict(seq_lens=[2, 5])), ('new token', dict(seq_lens=[3, 33])), ('positions', dict(query_lens=[3, 2])),
    ('positions', dict(positions=[0, 1, 2, 32])), ('positions', dict(positions=[0, 1, 2, -1])),
    ('positions', dict(positions=[0, 1, 2, 3])), ('positions', dict(positions=[5, 6, 7, 4])),
    ('token ids', dict(ids=[5, 6, 7, 29])), ('token ids', dict(ids=[5, 6, 7, -1])),
])
@pytest.mark.parametrize('decoder_of', [lambda m: m, ReferenceExecutor], ids=['model', 'decoder'])
@torch.inference_mode()
def test_metadata_that_does_not_go_together_is_refused_and_nothing_is_written(words, changed, decoder_of):
    m = model()
    p, model_or_decoder = pool(m), decoder_of(m)

    def call(ids=(5, 6, 7, 8), positions=(0, 1, 2, 4), **metadata):
        return execute_model(model_or_decoder, torch.tensor(ids), torch.tensor(positions), p.layers,
                             PagedMetadata(**{name: torch.tensor(value) for name, value in metadata.items()}))
    with pytest.raises(ValueError, match=words):
        call(**(METADATA | changed))
    assert not any(layer.k.data.any() for layer in p.layers)
    for other in (pool(model(n_layer=3)), pool(model(n_embd=64)), pool(m, block_size=8)):
        with pytest.raises(ValueError, match='make them for this model'):
            execute_model(model_or_decoder, torch.tensor([5]), torch.tensor([0]), [p.layers[0], *other.layers[1:]],
                          PagedMetadata(torch.tensor([0]), torch.tensor([[0]]), torch.tensor([1]), torch.tensor([1])))
    assert call(**METADATA).shape == (2, 29)


@torch.inference_mode()
def test_dropout_does_not_get_into_the_pool():
    m = model(dropout=0.5)
    p, tokens = pool(m), list(range(9))
    a = p.new()
    m.train()
    with pytest.raises(ValueError, match='eval'):
        feed(p, {a: tokens})
    m.eval()
    assert torch.allclose(feed(p, {a: tokens})[0], full_logits(m, tokens), atol=1e-5) and n_computed(p, tokens) == 1
    assert p.lengths == {a: 9}


def test_a_step_with_no_room_changes_nothing():
    m = model()
    p = pool(m, n_blocks=3)
    a, b = p.new(), p.new()
    with torch.inference_mode():
        feed(p, {a: list(range(9))})
    for new in ({b: [1]}, {a: [1], b: [1]}, {a: [1, 2, 3, 4]}):
        with pytest.raises(OutOfBlocks):
            feed(p, new)
        assert p.tokens.keys() == p.blocks.tables.keys() == p.blocks.length.keys() == {a} and not p.blocks.free
        assert p.lengths == {a: 9, b: 0}
    p.free(a)
    assert len(p.blocks.free) == 3


@torch.inference_mode()
def test_huge_keys_in_the_blocks_of_others_change_no_logits():
    m = model()
    m.transformer.h[0].attn.c_attn.bias[:32] = 30.0
    for n_new in (1, 3):
        p = pool(m)
        for layer in p.layers:  # finite numbers, as broken weights may leave them
            layer.k.data.fill_(1e38)
            layer.v.data.fill_(-1e38)
        texts = {p.new(): [1, 2, 3, 4, 5, 6], p.new(): [7, 8, 9]}
        for row, text in zip(feed(p, texts), texts.values()):
            assert torch.allclose(row, full_logits(m, text), atol=1e-5)
        new = list(range(10, 10 + n_new))
        for row, text in zip(feed(p, dict.fromkeys(texts, new)), texts.values()):
            assert torch.allclose(row, full_logits(m, text + new), atol=1e-5)
    p = pool(m)
    for layer in p.layers:
        layer.k.data.fill_(1e38)
    lens = torch.tensor([2, 2])
    metadata = PagedMetadata(torch.tensor([0, 1, 8, 9]), torch.tensor([[0], [2]]), lens, lens)
    logits = execute_model(m, torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 0, 1]), p.layers, metadata)
    for row, text in zip(logits, ([5, 6], [7, 8])):
        assert torch.allclose(row, full_logits(m, text), atol=1e-5)
