"""
One step after the other: compute a plan, draw, deliver. `engine.Engine` puts a thread and an inbox around it.
"""
import sys
import time

import numpy as np
import torch

from decode.kernel.threads import nanoseconds
from kvcache.blocks import OutOfBlocks
from serving.request import Output, pause
from serving.sampler import Drawing, Sampler
from serving.scheduler import Scheduler
from serving.stats import Stats
from tokenizer import TextStream, WholeTexts

new_output = tuple.__new__  # a third of the time of Output(...), for each token


class Live:
    """A request that has not ended. n_left: so many of its samples go on. begun: was anything of it delivered?"""
    __slots__ = 'request', 'samples', 'n_left', 'begun', 'time'

    def __init__(self, request):
        self.request, self.samples, self.n_left, self.begun = request, [], request.n, False
        self.time = time.monotonic()


class EngineCore:
    """
    cache: a `PagedCache`. bytes_of: the bytes of a token id. end_tokens: the tokens that end a text. special_ids: those
    without a text in an answer. budget: the most tokens of a step. ended: called with a `Live` when all of its samples
    have ended.
    """

    def __init__(self, cache, bytes_of, end_tokens, special_ids, budget, ended):
        self.cache, self.end_tokens, self.ended = cache, end_tokens, ended
        self.version = None  # of the cache's weights when the samples that run were computed
        self.device, self.vocab_size = cache.model.lm_head.weight.device, cache.model.config.vocab_size
        self.all_texts = WholeTexts(bytes_of)
        self.texts = WholeTexts(lambda token: b'' if token in special_ids else bytes_of(token))
        # {text: id}; a tokenizer may have more of them than the model has rows
        self.special_ids = {self.all_texts[token]: token for token in special_ids if token < self.vocab_size}
        self.scheduler, self.sampler = Scheduler(cache, budget), Sampler(self.vocab_size)
        self.stats = Stats(self.scheduler)

    def begin(self, live):
        """
        Submit a request, which the scheduler has checked. Each of its samples gets its live; its drawing, see
        `sampler.Drawing`; its text, a `TextStream`; the stop_ids that end it; `Logprobs` of the prompt's tokens so far,
        scored, from the second on; and first_time: when its first token was drawn.
        """
        request, p = live.request, live.request.params
        stop_ids = {*p.stop_token_ids, *(() if p.ignore_eos else self.end_tokens),
                    *(self.special_ids[text] for text in request.stop if text in self.special_ids)}
        texts = self.texts if request.skip_special else self.all_texts
        made = [(Drawing(request, i, stop_ids, self.vocab_size),
                 TextStream(texts, request.stop, p.min_tokens, request.include_stop, request.strip))
                for i in range(request.n)]
        live.samples = self.scheduler.submit(request)
        for sample, (sample.drawing, sample.text) in zip(live.samples, made):
            sample.live, sample.stop_ids, sample.scored, sample.first_time = live, stop_ids, [], None
        self.stats.requests += 1
        self.stats.prompt_tokens += len(request.prompt)
        if request.max_tokens == 0 and not p.prompt_logprobs:  # nothing of it is to be computed
            self.end(live, 'length')

    def plan(self):
        """`Scheduler.plan`, with samples that are computed anew if the weights have changed."""
        plan, n_steps = self.scheduler.plan()
        return self.scheduler.plan() if self.weights_changed() else (plan, n_steps)

    def weights_changed(self):
        """Have the weights changed since samples that run were computed? Then they are preempted."""
        before, self.version = self.version, self.cache.version
        if before in (None, self.version):
            return False
        self.preempt_all()
        return True

    def preempt_all(self):
        while self.scheduler.running:
            self.scheduler.preempt_newest()

    def stop_soon(self):
        """The present step is the last one before the engine reads its inbox. Any thread may call this."""
        self.sampler.stop_soon[0] = 1

    def repeat(self, plan, n_steps):
        """
        Run up to n_steps decode steps of a plan in one call. They end soon after a sample has ended, when `stop_soon`
        is called, and after the `pause` between two chunks of a stream. Then their tokens are added to the samples and
        delivered together. With stop strings or log probabilities a call is one step, or one round of proposals.
        """
        samples, rows = [sample for sample, _ in plan], range(len(plan))
        scored = any([sample.request.params.logprobs is not None for sample in samples])
        if scored or any([sample.text.stop for sample in samples]):
            n_steps = min(n_steps, 1 + self.cache.n_proposals(len(samples)))
        until = nanoseconds() + int(1e9 * pause(len({sample.live for sample in samples})))
        steps = self.sampler.several(n_steps, until, [sample.tokens[-1] for sample in samples], rows,
                                     [sample.drawing for sample in samples],
                                     np.array([sample.n_end - len(sample.tokens) for sample in samples]),
                                     [sample.tokens for sample in samples])
        if scored:
            steps.drawings = None  # a device that draws changes the logits
            if n_steps > 1:
                steps.logits = np.empty((n_steps, len(samples), self.vocab_size), np.float32)
        drawn = error = None
        try:
            logits = self.cache.decode_steps([sample.handle for sample in samples], steps)
            if not self.weights_changed():
                drawn = self.sampler.drawn_by(steps)
        except BaseException as e:
            error = e
        if drawn is None:  # what was drawn is drawn again
            for sample in samples:
                sample.drawing.restore(sample.tokens[sample.n_prompt:])
            if error:
                self.recover(plan, error)
            return
        counts = [*map(len, drawn)]
        self.stats.steps += steps.n_drawn
        self.stats.computed_tokens += sum(counts)
        self.scheduler.commit_steps(plan, counts, steps.n_drawn)
        of_samples = [None] * len(samples)
        if scored:
            of_steps = logits.float().cpu().numpy()[None] if steps.logits is None else steps.logits
            of_samples = [of_steps[:n, i] for i, n in enumerate(counts)]
        self.add_drawn(samples, drawn, of_samples, {})

    def step(self, plan):
        """Run one step of a plan. If there are too few blocks the newest sample gives way, and nothing is computed."""
        try:
            logits, rows = self.forward(plan)
        except BaseException as e:
            if isinstance(e, OutOfBlocks) and len(self.scheduler.running) > 1:
                self.scheduler.preempt_newest()
            else:
                self.recover(plan, e)
            return
        self.advance(plan, logits, rows)

    def recover(self, plan, error):
        """
        A step has failed: each sample makes it by itself, and the requests of those that fail again end. The cache has
        all sequences as before the step, but none of their tokens if logits were not numbers or a window is gone.
        """
        if not isinstance(error, Exception):  # Ctrl-C, which may come when the cache has the tokens of the step
            self.preempt_all()
            raise error
        print(f"a step of {len(plan)} samples failed, and is tried for each by itself: {error!r}", file=sys.stderr)
        for sample, n in plan:
            end = sample.computed + n
            if sample.handle is not None:  # else its request has ended, or the weights have changed
                sample.computed = self.cache.length(sample.handle)
            while sample.handle is not None and sample.computed < end:
                part = [(sample, min(end - sample.computed, self.scheduler.at_once))]
                try:
                    logits, rows = self.forward(part)
                except BaseException as e:
                    if not isinstance(e, Exception):
                        self.preempt_all()
                        raise
                    if isinstance(e, OutOfBlocks) and len(self.scheduler.running) > 1:
                        self.scheduler.preempt(sample)
                    else:
                        self.end(sample.live, 'error', f"{type(e).__name__}: {e}")
                else:
                    self.advance(part, logits, rows)
        for sample in self.scheduler.running[::-1]:
            if self.cache.length(sample.handle) != sample.computed:
                self.scheduler.preempt(sample)

    def forward(self, plan):
        """Compute the tokens of a plan. Returns (logits, float32 (W, vocab_size), the row of each one's last token)."""
        self.stats.steps += 1
        handles, rows, wanted = [sample.handle for sample, _ in plan], range(len(plan)), None
        tokens = [token for sample, n in plan for token in sample.tokens[sample.computed:sample.computed + n]]
        tokens = torch.from_numpy(np.array(tokens, np.int64)).to(self.device).split([n for _, n in plan])
        if any(sample.scores for sample, _ in plan):
            rows, wanted, first = [], [], 0
            for sample, n in plan:
                wanted += range(first if sample.scores else first + n - 1, first + n)
                rows.append(len(wanted) - 1)
                first += n
        logits = self.cache.step(handles, [sample.computed for sample, _ in plan], tokens, wanted)
        return logits.float().cpu().numpy(), rows

    def advance(self, plan, logits, rows):
        """The cache has a plan's tokens: score prompts, draw tokens, deliver them."""
        if self.weights_changed():  # keys of old weights were read
            return
        given, drawing = {}, []
        self.stats.computed_tokens += sum([n for _, n in plan])
        for (sample, n), row in zip(plan, rows):
            if sample.scores:
                self.score(sample, n, logits[row - n + 1:row + 1])
        for sample, number in self.scheduler.commit(plan):
            if len(sample.tokens) < sample.n_end:
                drawing.append((sample, rows[number]))
            else:  # its max_tokens is 0
                self.finish(sample, 'length')
                given.setdefault(sample.live, []).append(Output(sample.index, [], finish_reason='length'))
        samples, rows, drawn = [sample for sample, _ in drawing], [row for _, row in drawing], []
        if samples:
            drawn = [[token] for token in self.sampler.draw(logits, rows, [sample.drawing for sample in samples])]
        self.add_drawn(samples, drawn, [logits[row:row + 1] for row in rows], given)

    def score(self, sample, n, logits):
        """Note the log probabilities of the prompt's tokens behind the next n ones, by the logits (n, vocab_size)."""
        if sample.computed == 0:
            sample.scored.clear()
        targets = sample.tokens[sample.computed + 1:min(sample.computed + n + 1, sample.n_prompt)]
        if targets:
            k = sample.request.params.logprobs or 0
            sample.scored += self.sampler.logprobs(logits[:len(targets)], targets, k)

    def add_drawn(self, samples, drawn, of_samples, given):
        """
        Add the tokens of some steps to the samples that drew them, and deliver them. drawn: a list of n tokens of each
        sample. of_samples: the logits (n, vocab_size) from which they were drawn, for samples with log probabilities.
        given: {Live: `Output`s that it gets before these}.
        """
        now = time.monotonic()
        for sample, logits, new in zip(samples, of_samples, drawn):
            if sample.finished:  # with another one of its request, see below
                continue
            live = sample.live
            try:
                output = self.add(sample, new, logits, now)
            except Exception as e:  # of its text
                given.pop(live, None)
                self.end(live, 'error', f"{type(e).__name__}: {e}")
                continue
            if live in given:
                given[live].append(output)
            else:
                given[live] = [output]
        for live, outputs in given.items():
            self.deliver(live, outputs)

    def add(self, sample, new, logits, now):
        """
        Add n new tokens to a sample, up to the one that ends it. logits: (n, vocab_size), for log probabilities.
        Returns their `Output`.
        """
        tokens, stream, n_logprobs, reason, logprobs = (
            sample.tokens, sample.text, sample.request.params.logprobs, None, None)
        if sample.first_time is None:
            sample.first_time = now
        stops = new[-1] in sample.stop_ids
        text = stream.push(*(new[:-1] if stops and not sample.request.include_stop else new))
        if stream.stopped:
            del new[stream.n_pushed - (len(tokens) - sample.n_prompt):]
        tokens += new
        if stream.stopped or stops:
            reason = 'stop'
        elif len(tokens) == sample.n_end:
            reason = 'length'
        if n_logprobs is not None:
            logprobs = self.sampler.logprobs(logits[:len(new)], new, n_logprobs)
        if reason:
            text += stream.finish()
            self.finish(sample, reason)
        self.stats.generated_tokens += len(new)
        return new_output(Output, (sample.index, new, text, logprobs, reason, None, None, None))

    def finish(self, sample, reason):
        """A sample has ended: its blocks are free."""
        self.scheduler.remove(sample)
        self.stats.finished[reason] += 1
        live, first_time = sample.live, sample.first_time
        live.n_left -= 1
        n = len(sample.tokens) - sample.n_prompt
        if n > 1:
            self.stats.per_token.observe((time.monotonic() - first_time) / (n - 1))

    def deliver(self, live, outputs):
        """Hand outputs to a request. One that has ended is forgotten. One whose `deliver` raises is ended."""
        if not live.begun:
            live.begun, first = True, live.samples[0] if live.samples else None
            if first and first.n_cached is not None:
                if outputs[0].token_ids:
                    self.stats.first_token.observe(time.monotonic() - live.time)
                scored = [None, *first.scored] if live.request.params.prompt_logprobs else None
                outputs[0] = outputs[0]._replace(n_cached=first.n_cached, prompt_logprobs=scored)
        try:
            live.request.deliver(outputs)
        except Exception as e:
            print(f"request {live.request.id} is aborted, nobody takes its tokens: {e!r}", file=sys.stderr)
            for sample in live.samples:
                if not sample.finished:
                    self.finish(sample, 'abort')
            live.n_left = 0
        if live.n_left == 0:
            self.ended(live)

    def end(self, live, reason, error=None):
        """End all samples of a request that go on, with the text that was held back."""
        outputs = [] if live.samples else [Output(i, [], finish_reason=reason, error=error)
                                           for i in range(live.request.n)]
        live.n_left -= len(outputs)  # those of a request that could not begin
        for sample in live.samples:
            if not sample.finished:
                self.finish(sample, reason)
                outputs.append(Output(sample.index, [], '', None, reason, error=error))
        self.deliver(live, outputs)

    def end_all(self, all_live, reason, error=None):
        """End these requests, which are all that there are, and free all blocks, in whatever state the scheduler is."""
        self.scheduler.clear()
        for live in all_live:
            running = [s.index for s in live.samples if not s.finished] if live.samples else range(live.request.n)
            live.n_left, live.begun = 0, True
            for sample in live.samples:
                sample.finished = True
            self.stats.finished[reason] += len(running)
            self.deliver(live, [Output(i, [], finish_reason=reason, error=error) for i in running])
