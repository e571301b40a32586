"""
One step after the other, in one thread: plan, run, draw, deliver. `engine.Engine` puts a thread and an inbox around it.
"""
import sys
import time
from contextlib import suppress

import numpy as np
import torch
from kvcache.protocol import Work

from decode.kernel.threads import nanoseconds
from kvcache.blocks import OutOfBlocks
from serving.pace import pause
from serving.request import Output
from serving.sampler import Drawing, Sampler
from serving.scheduler import Scheduler
from serving.snapshot import Stats
from tokenizer import TextStream, WholeTexts

new_output = tuple.__new__  # a third of the time of Output(...), for each token


class Progress:
    """
    What the engine keeps of a sample. live: its request. drawing: see `sampler.Drawing`. text: its `TextStream`.
    stop_ids: the tokens that end it. n_logprobs: `SamplingParams.logprobs`. scored: `Logprobs` of the prompt's tokens
    so far, from the second on. first_time: when its first token was drawn. plain: can tokens be drawn before the one
    before them is added? Not with stop strings or logprobs.
    """
    __slots__ = 'live', 'drawing', 'text', 'stop_ids', 'n_logprobs', 'scored', 'first_time', 'plain'

    def __init__(self, live, drawing, text, stop_ids):
        self.live, self.drawing, self.text, self.stop_ids = live, drawing, text, stop_ids
        self.n_logprobs, self.scored, self.first_time = live.request.params.logprobs, [], None
        self.plain = not text.stop and self.n_logprobs is None


class Live:
    """A request that has not ended. n_left: so many of its samples go on. begun: was anything of it delivered?"""
    __slots__ = 'request', 'samples', 'n_left', 'begun', 'time'

    def __init__(self, request):
        self.request, self.samples, self.n_left, self.begun = request, [], request.n, False
        self.time = time.monotonic()


class EngineCore:
    """
    cache: a `PagedCache`. bytes_of: the bytes of a token id. eos_token: the token that ends a text, or None. budget:
    the most tokens of a step. ended: called with a `Live` when all of its samples have ended.
    """

    def __init__(self, cache, bytes_of, eos_token, budget, ended):
        self.cache, self.text_of_token, self.eos_token, self.ended = cache, WholeTexts(bytes_of), eos_token, ended
        self.version = None  # of the cache's weights when the samples that run were computed
        self.device, self.vocab_size = cache.model.lm_head.weight.device, cache.model.config.vocab_size
        self.scheduler = Scheduler(cache, budget, None if cache.decoder else 1)
        self.sampler, self.stats = Sampler(self.vocab_size), Stats(self.scheduler)
        self.drawing, self.of_rows, self.drawings = [], [], []  # samples that draw, their rows, their `Drawing`s
        self.plain = False  # do all of these samples have `Progress.plain`?
        self.repeated = None  # the plan of `repeat` that these lists were made for, or None

    def run_once(self):
        """Plan and run a step, or some steps of one plan. Returns whether there was anything to run."""
        plan = self.scheduler.plan()
        if plan and self.weights_changed():
            plan = self.scheduler.plan()
        try:
            if plan and plan is self.scheduler.steady and self.cache.decoder:
                self.repeat(plan)
            elif plan:
                self.step(plan)
        except BaseException:  # an interrupt, or an error outside of the model's step: `computed` may be wrong
            with suppress(Exception):
                self.forget_drawn()
            with suppress(Exception):
                self.preempt_all()
            raise
        return bool(plan)

    def begin(self, live):
        """Submit a request, which the scheduler has checked."""
        request, p = live.request, live.request.params
        self.stats.requests += 1
        self.stats.prompt_tokens += len(request.prompt)
        stop_ids = {*p.stop_token_ids}
        if self.eos_token is not None and not p.ignore_eos:
            stop_ids.add(self.eos_token)
        progress = [Progress(live, Drawing(request, i, stop_ids, self.vocab_size),
                             TextStream(self.text_of_token, request.stop), stop_ids) for i in range(request.n)]
        live.samples = self.scheduler.submit(request)
        for sample, of_sample in zip(live.samples, progress):
            sample.progress = of_sample
        if request.max_tokens == 0 and not request.params.prompt_logprobs:  # nothing of it is to be computed
            self.end(live, 'length')

    def weights_changed(self):
        """Have the weights changed since samples that run were computed? Then they are preempted."""
        before, self.version = self.version, self.cache.version
        if before in (None, self.version):
            return False
        self.preempt_all()
        return True

    def preempt_all(self):
        for sample in self.scheduler.running[::-1]:
            self.scheduler.preempt(sample)

    def step(self, plan):
        try:
            logits, rows = self.forward(plan)
        except Exception as e:
            self.step_each(plan, e)
            return
        if not self.weights_changed():
            self.advance(plan, logits, rows)

    def interrupt(self):
        """The present step is the last one before the engine reads its inbox. Any thread may call this."""
        self.sampler.interrupt[0] = 1

    def repeat(self, plan):
        """
        Run decode steps of one plan in compiled code. The steps end when a sample ends, when `interrupt` is called,
        after the `pause` between two chunks of a stream, or before the plan may need other blocks. Then their tokens
        are added to the samples and delivered together.
        """
        if plan is not self.repeated:
            self.draw_for([sample for sample, _ in plan], range(len(plan)), plan)
        n_requests = len({sample.request.id for sample, _ in plan})
        until = nanoseconds() + int(1e9 * pause(n_requests))
        newest, n_steps = [sample.tokens[-1] for sample in self.drawing], self.scheduler.n_repeats if self.plain else 1
        steps = self.sampler.several(n_steps, until, newest, self.of_rows, self.drawings)
        logits, error = None, None
        try:
            logits = self.cache.decode_steps([sample.handle for sample, _ in plan], steps).numpy()
        except BaseException as e:
            error = e
        self.stats.steps += max(steps.n_drawn, error is None)
        if error and not self.plain:
            self.forget_drawn()  # there are no logits
        elif steps.n_drawn:
            drawn = self.sampler.drawn_by(steps)
            self.scheduler.commit_repeats(plan, len(drawn))
            self.stats.computed_tokens += len(plan) * len(drawn)
            self.add_drawn(plan, drawn, logits, {})
        if error is None:
            self.weights_changed()
        elif isinstance(error, Exception):
            self.step_each(plan, error)
        else:
            raise error

    def forget_drawn(self):
        """Set each sample's draws back to its own tokens. Tokens that were drawn but not added are drawn again."""
        for sample in {*self.scheduler.running, *self.drawing}:  # siblings that drew may wait
            sample.progress.drawing.restore(sample.tokens[sample.n_prompt:])

    def step_each(self, plan, error):
        """A step has failed, and the cache is as before it. The same, one by one; requests that fail again end."""
        print(f"a step of {len(plan)} samples failed, and is tried for each by itself: {error!r}", file=sys.stderr)
        for sample, n in plan:
            if sample.handle is None:  # its request has ended, or the weights have changed
                continue
            if self.cache.lengths.get(sample.handle) != sample.computed:  # its window is gone
                self.scheduler.preempt(sample)
                continue
            try:
                logits, rows = self.forward([(sample, n)])
            except Exception as e:
                if isinstance(e, OutOfBlocks) and len(self.scheduler.running) > 1:
                    self.scheduler.preempt(sample)
                else:
                    self.end(sample.progress.live, 'error', f"{type(e).__name__}: {e}")
                continue
            if self.weights_changed():
                return
            self.advance([(sample, n)], logits, rows)

    def forward(self, plan):
        """Compute the tokens of a plan. Returns (logits, float32 (W, vocab_size), the row of each one's last token)."""
        self.stats.steps += 1
        handles, rows, wanted = [sample.handle for sample, _ in plan], range(len(plan)), None
        tokens = [token for sample, n in plan for token in sample.tokens[sample.computed:sample.computed + n]]
        tokens = torch.from_numpy(np.array(tokens, np.int64)).to(self.device).split([n for _, n in plan])
        if self.cache.decoder and any(sample.scores for sample, _ in plan):
            rows, wanted, first = [], [], 0
            for sample, n in plan:
                wanted += range(first if sample.scores else first + n - 1, first + n)
                rows.append(len(wanted) - 1)
                first += n
        work = Work(handles, [sample.computed for sample, _ in plan], tokens)
        logits = self.cache.step(work) if wanted is None else self.cache.step(work, wanted)
        return (logits if self.cache.decoder else logits.float().cpu()).numpy(), rows

    def advance(self, plan, logits, rows):
        """The cache has a plan's tokens: score prompts, draw tokens, deliver them."""
        given = {}
        self.stats.computed_tokens += sum(n for _, n in plan)
        for (sample, n), row in zip(plan, rows):
            if sample.scores:
                self.score(sample, n, logits[row - n + 1:row + 1])
        self.choose_drawing([(sample, rows[number]) for sample, number in self.scheduler.commit(plan)], given)
        drawn = [self.sampler.draw(logits, self.of_rows, self.drawings)] if self.drawing else []
        self.add_drawn(plan, drawn, logits, given)

    def add_drawn(self, plan, drawn, logits, given):
        """
        Add the tokens of some steps of a plan to the samples that drew them, and deliver them. drawn: for each step a
        token of each sample. logits: of the last step. given: {Live: `Output`s that it gets before these}.
        """
        now = time.monotonic()
        for sample, row, *new in zip(self.drawing, self.of_rows, *drawn):
            if sample.finished:  # with another one of its request, see below
                continue
            live = sample.progress.live
            try:
                output = self.add(sample, new, logits, row, now)
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

    def choose_drawing(self, caught_up, given):
        """Note which samples draw a token, of (sample, row of its logits); end the others, whose max_tokens is 0."""
        drawing = [(sample, row) for sample, row in caught_up if len(sample.tokens) < sample.n_end]
        self.draw_for([sample for sample, _ in drawing], [row for _, row in drawing])
        for sample, _ in caught_up:
            if len(sample.tokens) == sample.n_end:
                self.finish(sample, 'length')
                given.setdefault(sample.progress.live, []).append(Output(sample.index, [], finish_reason='length'))

    def draw_for(self, samples, rows, repeated=None):
        """Note that these samples draw a token, each from its row of the logits. repeated: the plan of `repeat`."""
        progress = [sample.progress for sample in samples]
        self.drawing, self.of_rows, self.drawings = samples, rows, [p.drawing for p in progress]
        self.plain, self.repeated = all([p.plain for p in progress]), repeated

    def score(self, sample, n, logits):
        """Note the log probabilities of the prompt's tokens behind the next n ones, by the logits (n, vocab_size)."""
        if sample.computed == 0:
            sample.progress.scored.clear()
        targets = sample.tokens[sample.computed + 1:min(sample.computed + n + 1, sample.n_prompt)]
        if targets:
            k = sample.request.params.logprobs or 0
            sample.progress.scored += self.sampler.logprobs(logits[:len(targets)], targets, k)

    def add(self, sample, new, logits, row, now):
        """
        Add the tokens that were drawn to a sample, one unless it is plain; only the last may end it. logits: those from
        whose row it was drawn. Returns their `Output`.
        """
        progress, tokens, reason, logprobs = sample.progress, sample.tokens, None, None
        tokens += new
        if progress.first_time is None:
            progress.first_time = now
        stream, stops = progress.text, new[-1] in progress.stop_ids
        text = stream.push(*(new[:-1] if stops else new))
        if stream.stopped or stops:
            reason = 'stop'
        elif len(tokens) == sample.n_end:
            reason = 'length'
        if progress.n_logprobs is not None:
            logprobs = self.sampler.logprobs(logits[row:row + 1], new, progress.n_logprobs)
        if reason:
            text += stream.finish()
            self.finish(sample, reason)
        self.stats.generated_tokens += len(new)
        return new_output(Output, (sample.index, new, text, logprobs, reason, None, None, None))

    def finish(self, sample, reason):
        """A sample has ended: its blocks are free."""
        self.scheduler.remove(sample)
        self.stats.finished[reason] += 1
        live, first_time = sample.progress.live, sample.progress.first_time
        live.n_left -= 1
        n = len(sample.tokens) - sample.n_prompt
        if n > 1:
            self.stats.per_token.append((time.monotonic() - first_time) / (n - 1))

    def deliver(self, live, outputs):
        """Hand outputs to a request. It is forgotten if it has ended, and ended if it raises."""
        if not live.begun:
            live.begun, first = True, live.samples[0] if live.samples else None
            if first and first.n_cached is not None:
                if outputs[0].token_ids:
                    self.stats.first_token.append(time.monotonic() - live.time)
                scored = [None, *first.progress.scored] if live.request.params.prompt_logprobs else None
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
        outputs = []
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
