"""
One text with drafts and without: the same tokens, sooner or not.

    python bench.py --mode=drafts
    python bench.py --mode=drafts --only=shapes --shape=L --json=out-bench/drafts.json

The part `trained` is the newest out*/ckpt.pt, which goes on with pieces of its validation text. The part `shapes` has
random weights, of which no draft of a trained model can be made: the int4 and int8 weights compute as always, and what
they propose is then replaced by the model's own next tokens for a share of the proposals, by wrong ones for the rest.
"""
import numpy as np
import torch

import decode
from benchmarks.harness import Case, Part, take_turns
from benchmarks.loss import model_and_text
from benchmarks.shapes import PROMPT, config_of
from decode.drafts import PackedDraft
from decode.speculative import SpeculativeDecoder
from generation import generate
from model import GPT

CPU_ONLY = "drafts are for the CPU decoder, whose times are measured"
SAMPLINGS = {'greedy': dict(temperature=0), 'sampled': dict(temperature=0.8, top_k=200)}
PIECES = 4  # texts that a trained model goes on with, one after the other
SHARES = 0.8, 0.9, 0.95, 0.98  # of proposals that are accepted, if those before them were


class Replaced(PackedDraft):
    """A draft whose proposals are replaced, see the top of this file. text: the prompt and the tokens behind it."""

    def __init__(self, decoder, weights, share):
        super().__init__(decoder, weights)
        self.share, self.random, self.text = share, np.random.default_rng(0), None

    def propose(self, tokens, rounds):
        n, at = super().propose(tokens, rounds), int(rounds.positions[0]) + 1
        for row, right in enumerate(self.text[at:at + n], 1):
            tokens[row] = right if self.random.random() < self.share else (right + 1) % self.decoder.vocab_size
        return n


def trained(asked):
    """A row for each way to sample and each draft, of one sequence."""
    model, text = model_and_text(asked)
    n = model.config.block_size // 2
    prompts = [text[i:i + n].tolist() for i in torch.linspace(0, len(text) - n, PIECES + 2).long().tolist()[1:-1]]
    decoders = {draft: decode.best(model, 1, speculate=draft) for draft in ('off', 'int4', 'int8', 'ngram')}
    for sampling, how in SAMPLINGS.items():
        cases = [Case(dict(sampling=sampling, draft=draft), drawing(model, decoder, prompts, n, how),
                      per=n * len(prompts)) for draft, decoder in decoders.items()]
        yield rows_of(take_turns(cases, asked.repeats, f'trained, {sampling}'), decoders)


def shapes(asked):
    """A row for each shape, way to sample, type of weights and share of proposals that are accepted."""
    for name, _, T in asked.combinations(('L', 'M', 'S'), lengths={'L': (100,), 'M': (200,), 'S': (100,)}):
        model = GPT(config_of(name, asked.bias)).eval()
        plain, prompt = decode.best(model, 1), torch.randint(model.config.vocab_size, (PROMPT,)).tolist()
        for sampling, how in SAMPLINGS.items():
            decoders = {('off', None): plain}
            for weights in ('int4', 'int8'):
                for share in SHARES:
                    decoder = decoders[weights, share] = SpeculativeDecoder(model, weights)
                    decoder.draft = Replaced(decoder, weights, share)
            text = drawing(model, plain, [prompt], T, how)()[0]
            for (draft, _), decoder in decoders.items():
                if draft != 'off':
                    decoder.draft.text = text
            cases = [Case(dict(shape=name, sampling=sampling, draft=draft, share=share),
                          drawing(model, decoder, [prompt], T, how), per=T)
                     for (draft, share), decoder in decoders.items()]
            yield rows_of(take_turns(cases, asked.repeats, f'{name}, {sampling}'), decoders)


def drawing(model, decoder, prompts, n, how):
    """A function that goes on with each prompt by n tokens, one after the other."""
    def draw():
        texts = []
        for seed, prompt in enumerate(prompts):
            of = [torch.Generator().manual_seed(seed)]
            texts += generate(model, [prompt], n, use_cache=True, decoder=decoder, generator=of, **how)
        return texts
    return draw


def rows_of(measured, decoders):
    """tok_per_s, over_plain; accepted: the measured share; k: proposals of a round at the end, 0 without drafts."""
    plain, rows = measured[0], []
    for m, decoder in zip(measured, decoders.values()):
        pace = decoder.pace(1, True) if isinstance(decoder, SpeculativeDecoder) else None
        rows.append(m.row(tok_per_s=1 / m.seconds, over_plain=plain.over(m), same_tokens=m.result == plain.result,
                          accepted=pace.accepted / pace.tried if pace and pace.tried else None, k=pace and pace.k))
    return rows


FIGURES = 'draft share tok_per_s over_plain accepted k same_tokens'
PARTS = dict(
    trained=Part(trained, 1, "one text of a trained model, tokens a second", f'sampling {FIGURES}'),
    shapes=Part(shapes, 4, "one text, random weights, replaced proposals", f'shape sampling {FIGURES}'))
