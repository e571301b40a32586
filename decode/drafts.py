"""
Who proposes tokens for `decode.speculative`: the same model with fewer bits, the text itself, or another model.

A draft has a `name`; `propose(tokens, rounds)`, which writes up to k proposals of each sequence to the rows behind the
first of tokens, int64 (k + 1, B), and returns how many rows it has written; and `draws`: were they drawn by the
`NextTokens` of the call, with the noise of their places? rounds: the `speculative.Rounds` of the call.
"""
import torch

from decode.cpu import CPUDecoder
from decode.metadata import InputMetadata, NextTokens

LONGEST, SHORTEST = 4, 2  # n-grams of the text that are looked for


def made(draft, decoder):
    """The draft of a decoder: 'int4', 'int8', 'ngram', or a `ModelDraft`, which must have the decoder's vocabulary."""
    if isinstance(draft, str):
        return NgramDraft() if draft == 'ngram' else PackedDraft(decoder, draft)
    vocab_size = draft.cache.model.config.vocab_size
    if vocab_size != decoder.vocab_size:
        raise ValueError(f"draft={draft.name} has a vocabulary of {vocab_size}, and the model one of "
                         f"{decoder.vocab_size}: take a draft with the tokenizer of the model")
    return draft


class PackedDraft:
    """
    The model of a decoder with its weights in `weights`, int8 or int4, over the same cache: it reads the keys and
    values that the model has computed, and writes its own for the proposals, over which the model then writes.
    """
    draws = True

    def __init__(self, decoder, weights):
        self.name, self.decoder = f'{weights} weights', CPUDecoder(decoder.model, weights, decoder.n_threads)
        self.refresh = self.decoder.refresh

    def propose(self, tokens, rounds):
        B = tokens.shape[1]
        drawn = NextTokens(rounds.new.draw, rounds.data, tokens)
        drawn.n_steps = len(tokens) - 1
        logits = torch.empty(B, self.decoder.vocab_size, device='cpu')
        self.decoder.run(torch.from_numpy(tokens[0]), rounds.positions, rounds.kv,
                         InputMetadata([1] * B, rounds.runs, None, drawn), logits, rounds.n_threads)
        return drawn.n_drawn


class NgramDraft:
    """
    The text itself: its last n tokens have come before, and what came behind them is proposed; first n = LONGEST is
    looked for, last SHORTEST. Known as prompt lookup. texts: {id of the list of a text: its `Ngrams`}, of the last
    call.
    """
    name, draws = 'n-grams of the text', False

    def __init__(self):
        self.texts = {}

    def refresh(self):
        """The text does not depend on the weights."""

    def propose(self, tokens, rounds):
        k, found, known = len(tokens) - 1, [], {}
        for i, text in enumerate(rounds.new.texts or ()):
            known[id(text)] = ngrams = self.texts.get(id(text)) or Ngrams(text)
            found.append(ngrams.after(rounds.drawn_since(i), k))
        self.texts = known
        n = max(map(len, found), default=0)
        for i, proposals in enumerate(found):
            tokens[1:n + 1, i] = tokens[0, i]  # where a text offers fewer
            tokens[1:len(proposals) + 1, i] = proposals
        return n


class Ngrams:
    """The n-grams of a text, a list that grows. ends: {n-gram: the number of the token behind the last one}."""

    def __init__(self, text):
        self.text, self.tokens, self.ends = text, [], {}

    def after(self, drawn, k):
        """Up to k tokens from behind the last n-gram with which the text and the tokens drawn since end."""
        n = len(self.tokens)
        start = max(0, n - 2 * LONGEST)
        new = self.tail(start, drawn)
        if new[:n - start] != self.tokens[start:]:  # the text is another one
            self.tokens, self.ends, n, start, new = [], {}, 0, 0, self.tail(0, drawn)
        for token in new[n - start:]:
            self.add(token)
        for size in range(LONGEST, SHORTEST - 1, -1):
            at = self.ends.get(tuple(self.tokens[-size:]))
            if at is not None:
                return self.tokens[at:at + k]
        return []

    def tail(self, start, drawn):
        return self.text[start:] + drawn[max(0, start - len(self.text)):]

    def add(self, token):
        for size in range(SHORTEST, min(LONGEST, len(self.tokens)) + 1):
            self.ends[tuple(self.tokens[-size:])] = len(self.tokens)
        self.tokens.append(token)


class ModelDraft:
    """
    Another model with the same vocabulary, usually a smaller one. cache: a `kvcache.base.BaseCache` of it, with a
    compiled step, for DRAFTED_SEQUENCES sequences or more: it proposes nothing for more texts than it has room for. Its
    sequences follow the texts of the calls, whatever becomes of these in the cache of the model itself. A text that is
    too long for it is cut to its end. Where its cache refuses a step, it proposes nothing and begins its texts anew.

    known: {id of the list of a text: its `Followed`}. It ends with those of the last call.
    """
    draws = True

    def __init__(self, cache, name):
        self.cache, self.name, self.known = cache, name, {}

    def refresh(self):
        """Its weights are compared when a sequence of its cache begins."""

    def propose(self, tokens, rounds):
        texts, drawn = rounds.new.texts or (), NextTokens(rounds.new.draw, rounds.data, tokens)
        if not 0 < len(texts) <= self.cache.n_seq:
            return 0
        try:
            n = max(len(text) + len(rounds.drawn_since(i)) for i, text in enumerate(texts)) + len(tokens)
            if (cache := self.cache.with_room(n)) is not self.cache:
                self.cache, self.known = cache, {}
            followed = [self.follow(text, rounds.drawn_since(i), len(tokens) - 1) for i, text in enumerate(texts)]
            if all(followed):
                self.cache.decode_steps([each.handle for each in followed], drawn)
                for i, each in enumerate(followed):
                    each.tokens += tokens[:drawn.n_drawn, i].tolist()
        except ValueError:  # its cache has no room, its window has passed what it needs, or its logits are not numbers
            while self.known:
                self.cache.free(self.known.popitem()[1].handle)
        return drawn.n_drawn

    def follow(self, text, drawn, k):
        """
        The `Followed` of a text and the tokens drawn since, all but the newest of which are in the cache then, with
        room for k more. None if the model has no room for so many.
        """
        each = self.known.pop(id(text), None) or Followed(text, self.new_handle())
        self.known[id(text)] = each
        most, n = self.cache.model.config.max_positions, len(text) + len(drawn) - 1
        if n - each.start + k > most:
            each.start, each.tokens = n - int(most) // 2, []
        if n - each.start + k > most or n == each.start:
            return None
        context = text[each.start:] + drawn
        n_same = next((i for i, (a, b) in enumerate(zip(each.tokens, context)) if a != b), len(each.tokens))
        n_same = min(n_same, len(context) - 1)
        if n_same < len(context) - 1:
            self.cache.step([each.handle], [n_same], [torch.tensor(context[n_same:-1])])
        elif n_same < len(each.tokens):
            self.cache.truncate(each.handle, n_same)
        each.tokens = context[:-1]
        return each

    def new_handle(self):
        """The handle of a new sequence. If all are in use, that of the text followed longest ago is freed."""
        if len(self.known) == self.cache.n_seq:
            self.cache.free(self.known.pop(next(iter(self.known))).handle)
        return self.cache.new()


class Followed:
    """A text in the cache of a `ModelDraft`: its tokens from number `start` on are there, a list, with this handle."""

    def __init__(self, text, handle):
        self.text, self.handle, self.start, self.tokens = text, handle, 0, []
