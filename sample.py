"""
Sample from a trained model, or from GPT-2.

    python sample.py                                        the newest out*/ckpt.pt, ten samples
    python sample.py --num_samples=1 --start="To be"        one sample, streamed as it is drawn
    python sample.py --init_from=gpt2 --start=FILE:prompts.txt --split=lines       every line of a file, in one batch
    python sample.py --weights=int8 --when_full=shift       the fastest settings; other tokens, see docs/SAMPLING.md
    python sample.py --init_from=FOLDER --chat              talk with a chat model, such as SmolLM2-135M-Instruct

The samples go to stdout, everything else to stderr. KV_DEBUG=1 traces the cache, KV_DEBUG=page writes a page about it.
"""
import json
import math
import re
import signal
import sys
import time
from contextlib import nullcontext, suppress

import configurator  # before torch: it says so in one line where torch is missing

# isort: split
import torch
from tqdm import tqdm

import checkpoint
import debug_kv_model
import debug_kv_page
import decode
import model as plain_model
from chat.conversation import Conversation, talk
from decode.batch import NotNumbers
from decode.draw import DrawSettings, draw
from decode.eager import are_numbers
from device import DTYPES, autocast, pick_device, pick_dtype, share_cores, synchronize, trusted_dtype
from engine.engine import PAGE_SIZE, Engine, default_pool, pool_for
from engine.sequence import AHEAD_OF_STOPS, MOST_AHEAD
from formats.pretrained import generation_defaults
from kvcache import bytes_of_slots, make_layers, pages_for
from kvcache.storage import free_memory
from serving.constraints import Vocabulary, compiled
from tokenizer import TextStream, read_text

init_from = 'resume'  # resume (from out_dir), owner/name of a model on the hub, gpt2 (-medium, -large, -xl), a folder
                      # in Hugging Face format, or a GGUF file
out_dir = ''          # where ckpt.pt is; by default wherever the newest out*/ckpt.pt is
start = '\n'          # the prompt, or FILE:path to read it from a file
split = ''            # lines: each line of the prompt, up to its \n or \r\n, is a prompt of its own
num_samples = 10      # how many to draw, of each prompt
batch_size = 64       # how many of them at once, at the most
max_new_tokens = 500  # of each sample
temperature = 0.8     # below 1 is tamer, above is wilder, 0 takes the likeliest token each time
top_k = 200           # draw from the k likeliest tokens only; 0 draws from all
top_p = 1.0           # draw from the fewest tokens that hold this much probability
stop = ''             # end a sample where this text comes up; \n, \t and \\ are a newline, a tab and a backslash
use_cache = True      # keep keys and values instead of computing them again: the same tokens, sooner
when_full = 'auto'    # of a full context: crop keeps the last block_size tokens (exact, slow), shift half of them, roll
                      # all keys, of which a window is seen; auto is roll if the model has a window and no learned
                      # positions, and crop otherwise
keep = 0              # with shift: keep so many of the last tokens instead of half; with roll: the window
n_keep = 0            # with shift and roll: keep so many of the first tokens of the prompt as well
kv_cache = 'blocks'   # where keys and values live: blocks (vLLM's), streams or unified (llama.cpp's cells)
kv_bits = 0           # keep them in 8 bits instead of as they are
decoder = 'auto'      # what computes a cached step: eager, cpu, gpu; auto is the fastest there is
weights = 'float32'   # how they are read: float32, or rounded: bfloat16, int8, int4, which is faster on a CPU
threads = 0           # of the cpu decoder; 0 lets the decoder choose
speculate = 'auto'    # the same tokens, sooner: off; int4, int8 (fewer bits) or ngram (the text) propose tokens, which
                      # the model computes together; auto is int8, int4 or off, whichever is faster
draft = ''            # or another model proposes them: a folder with ckpt.pt, or what init_from takes
seed = 1337           # of the first sample, the next has the next; the same seed gives the same sample
device = 'auto'       # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'        # float32, bfloat16 or float16; auto goes by the device
compile = False       # of nanoGPT; the decoders here are faster
chat = False          # talk with a chat model; start, if it is given, is the first message
system = ''           # with chat: the system message
template_kwargs = ''  # with chat: what the chat template finds, as JSON: '{"enable_thinking": false}'
generation_config = ''  # with chat: none leaves out what generation_config.json says of the draw
json_schema = ''      # each sample is JSON of the schema in this file (pip install llguidance)
regex = ''            # or matches this regular expression as a whole
grammar = ''          # or the grammar in this file, in llguidance's Lark or llama.cpp's GBNF

CELLS = 'streams', 'unified'  # of kv_cache
OF_SAMPLES = 'num_samples', 'batch_size', 'stop', 'when_full', 'keep', 'n_keep'  # without effect in a conversation


def main(config):
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # as quiet as Ctrl-C
    dev = pick_device(device)
    if dev == 'cpu':
        share_cores()
    check_settings(dev)
    if chat and (of_samples := [name for name in OF_SAMPLES if name in config.given]):
        raise ValueError(f"a conversation takes no {' and no '.join(of_samples)}: leave that out, or leave chat out")
    texts = read_prompts()
    gpt = debug_kv_model if debug_kv_model.tracing() else plain_model
    of_weights = torch.float32 if dtype == 'float32' else None
    model, tokenizer, _ = checkpoint.load_model(init_from, out_dir, gpt, dev, of_weights, weights)
    debug_kv_model.check_layer(model.config.n_layer)
    dt = trusted_dtype(plain_model.GPT, plain_model.GPTConfig, dev, pick_dtype(dtype, dev))
    decode.converted(model, decoder, None if decoder == 'eager' else DTYPES[dt])
    with autocast(dev, dt):
        if chat:
            return chat_with(model, tokenizer, dev, texts if 'start' in config.given else (), config.given)
        print_samples(model, tokenizer, texts, dev)


def print_samples(model, tokenizer, texts, dev):
    """Print the samples of all prompts, and on stderr how long it took."""
    prompts = [tokenizer.encode(text) for text in texts]
    model = rolled(model)
    say_what_is_cut(prompts, model.config)
    printed = Printed(model, tokenizer, prompts)
    page = debug_kv_page.recorded(model, tokenizer) if debug_kv_model.wants_page() else nullcontext()
    with page:
        (sample_by_model if by_model() else sample_by_engine)(model, tokenizer, prompts, dev, printed)
    synchronize(dev)
    n, dt = printed.n_drawn, time.perf_counter() - printed.began
    print(f"{n:,} tokens in {dt:.2f} s: {n / dt:,.0f} tok/s ({'with' if use_cache else 'without'} the cache, {dev})",
          file=sys.stderr)


class Printed:
    """
    Prints samples on stdout: a single one token by token, several in order, each when it and those before have ended.
    Enter it when drawing begins: time counts from there, and what was drawn is printed, whatever ends the run.
    """

    def __init__(self, model, tokenizer, prompts):
        end, token_bytes = unescaped_stop(tokenizer), tokenizer.bytes_of_tokens(model.config.vocab_size)
        self.n = num_samples * len(prompts)
        self.texts = [tokenizer.decode(prompt) for prompt in prompts for _ in range(num_samples)]
        self.streams, self.ended = [TextStream(token_bytes, [end]) for _ in self.texts], [False] * self.n
        self.streamed = self.n == 1 and not debug_kv_model.tracing()  # a trace would come in the middle of the text
        self.n_drawn = self.n_printed = self.n_begun = 0

    def __enter__(self):
        self.began, quiet = time.perf_counter(), self.streamed or debug_kv_model.tracing()
        self.bar = tqdm(total=self.n * max_new_tokens, unit='tok', disable=True if quiet else None)
        if self.streamed:
            print(self.texts[0], end='', flush=True)
        return self

    def add(self, number, tokens, ended):
        """New tokens of a sample. ended: are they its last ones? Returns whether the text has come to `stop`."""
        stream = self.streams[number]
        before, piece, stopped = stream.n_pushed, stream.push(*tokens), stream.stopped
        n = stream.n_pushed - before if stop else len(tokens)  # those up to `stop`
        self.n_drawn += n
        self.n_begun = max(self.n_begun, number + 1)
        self.bar.update(n)
        self.ended[number] = ended or stopped
        if self.streamed:
            print(piece, end='', flush=True)
        self.texts[number] += piece
        while not self.streamed and self.n_printed < self.n and self.ended[self.n_printed]:
            self.print_next()
        return stopped

    def print_next(self):
        with self.bar.external_write_mode():
            text = self.texts[self.n_printed] + self.streams[self.n_printed].finish()
            print(text + '\n---------------' * (self.n > 1), flush=True)
        self.n_printed += 1

    def __exit__(self, *error):
        if self.streamed:
            print(self.streams[0].finish())
        while not self.streamed and self.n_printed < (self.n_begun if max_new_tokens else self.n):
            self.print_next()
        self.bar.close()


def by_model():
    """Does `GPT.generate` draw? Without a cache it does, and for a trace unless a setting needs the engine."""
    asked = decode.asked_of_the_kernel(weights, threads, speculate, draft)
    of_engine = asked or kv_cache in CELLS or kv_bits or when_full == 'shift' or json_schema or regex or grammar
    return not use_cache or debug_kv_model.tracing() and decoder in ('auto', 'eager') and not of_engine


def sample_by_engine(model, tokenizer, prompts, dev, printed):
    """Draw all samples, as many at a time as batch_size says."""
    n_sequences = min(batch_size, num_samples * len(prompts))
    n_tokens = max(map(len, prompts)) + max_new_tokens
    pool, how, number_of = pool_of(model.config, n_sequences, n_tokens), draw_settings(), {}
    engine = engine_for(model, tokenizer, n_sequences, n_tokens, pool, dev)
    how['most_ahead'] = AHEAD_OF_STOPS if stop else MOST_AHEAD
    if when_full in ('crop', 'shift'):
        how |= dict(when_full=when_full, keep=keep or None, n_keep=n_keep)
    if constraint := constraint_of(model, tokenizer):
        how |= dict(constraint=constraint, stop_ids=tokenizer.end_tokens)
    with engine.executor.torch_on_one_thread():
        if not debug_kv_model.tracing():  # a step that is not counted, in which kernels are compiled, or read
            engine.generate([prompts[0][:1]], min(1, max_new_tokens), n_sequences, **draw_settings())
        with printed:
            for i, prompt in enumerate(prompts):
                for s in engine.add(prompt, max_new_tokens, num_samples, seed + i * num_samples, **how):
                    number_of[s] = len(number_of)
            while not all(s.ended for s in number_of):
                for s, output in engine.step():
                    if s.error:
                        raise s.error
                    new = output.tokens[:-1] if s.ended == 'stop' else output.tokens
                    if printed.add(number_of[s], new, s.ended):
                        engine.end(s, 'stop')


def sample_by_model(model, tokenizer, prompts, dev, printed):
    """The same by `GPT.generate` with the engine's draw."""
    print("decoder: the model itself", file=sys.stderr)
    with printed:
        for i, prompt in enumerate(prompts):
            for first in range(0, num_samples, batch_size):
                numbers = [i * num_samples + n for n in range(first, min(first + batch_size, num_samples))]
                draw_rows(model, torch.tensor([prompt] * len(numbers), device=dev), numbers, printed)


def draw_rows(model, idx, numbers, printed):
    """Draw the samples with these numbers, each after its row of idx."""
    settings = [DrawSettings(model.config.vocab_size, seed + number, **draw_settings()) for number in numbers]

    def draw_and_print(logits, i):
        if not are_numbers(logits):
            raise NotNumbers
        tokens = draw(logits, settings, [i] * len(numbers))
        stopped = [printed.add(n, [token], i + 1 == max_new_tokens) for n, token in zip(numbers, tokens.tolist())]
        if all(stopped) and not debug_kv_model.tracing():  # a trace is of a whole generation
            raise StopIteration
        return tokens[:, None]
    with suppress(StopIteration):  # all have come to `stop`
        model.generate(idx, max_new_tokens, use_cache=use_cache, draw=draw_and_print)


def draw_settings():
    """How samples are drawn, as settings of `decode.draw.DrawSettings`."""
    return dict(temperature=temperature, top_k=top_k, top_p=top_p)


def constraint_of(model, tokenizer):
    """What json_schema, regex or grammar asks for, a `serving.constraints.Constraint`, or None."""
    for kind, given in dict(json_schema=json_schema, regex=regex, grammar=grammar).items():
        if given:
            try:
                return compiled(kind, given if kind == 'regex' else read_text(given),
                                Vocabulary(tokenizer, model.config.vocab_size))
            except ValueError as e:
                raise ValueError(f"{kind}: {e}") from e


def chat_with(model, tokenizer, dev, first, given):
    """Talk with a chat model in the terminal. first: the first messages. given: the names of settings that are set."""
    of_file = generation_defaults(init_from, generation_config)
    of_file = {name: value for name, value in of_file.items() if name not in given}
    how = draw_settings() | of_file
    print(f"sampling: {', '.join(f'{name}={value}' for name, value in how.items())}"
          f"{' (generation_config.json; --generation_config=none leaves it out)' * bool(of_file)}", file=sys.stderr)
    constraint = constraint_of(model, tokenizer)
    engine = engine_for(model, tokenizer, 1, model.config.block_size, pool_of_chat(model, dev), dev)
    conversation = Conversation(engine, tokenizer, system=system, variables=of_template(), seed=seed,
                                constraint=constraint, **how)
    with engine.executor.torch_on_one_thread():
        talk(conversation, max_new_tokens, first)


def engine_for(model, tokenizer, n_sequences, n_tokens, pool, dev):
    """An `Engine` for so many sequences of so many tokens, with the executor that was asked for; stderr says which."""
    proposing = None
    if draft:
        small = checkpoint.load_draft(draft, plain_model, model, tokenizer)
        of_small = pool_for(small.config, min(n_sequences, decode.DRAFTED_SEQUENCES), n_tokens)
        proposing = decode.draft_of(small, draft, of_small, make_layers(small, of_small.n_slots))
    is_traced = debug_kv_model.tracing() and not decode.asked_of_the_kernel(weights, threads, speculate, draft)
    name = 'eager' if decoder == 'auto' and is_traced else decoder  # others have no trace
    executor = decode.best(model, n_sequences, weights, threads, name, 'off' if chat else speculate, proposing,
                           pick_dtype(dtype, dev), kv_bits)
    engine = Engine(model, executor, pool, 512 if chat else 2**14, n_sequences, kv_bits)
    print(f"decoder: {executor.name}", file=sys.stderr)
    return engine


def pool_of(config, n_sequences, n_tokens):
    """The pool that kv_cache names, for so many sequences of so many tokens."""
    if kv_cache in CELLS:
        from kvcache.llamacpp.pool import CellPool
        return CellPool(config, n_sequences, n_tokens, unified=kv_cache == 'unified')
    return pool_for(config, n_sequences, n_tokens)


def pool_of_chat(model, dev):
    """A pool for a whole context, or as much of it as half of the free memory holds; it takes memory as it is used."""
    n_free = free_memory(torch.device(dev)) / 2 / bytes_of_slots(
        model.config, PAGE_SIZE, 'int8' if kv_bits else 'float32')
    return default_pool(model.config, max(1, int(min(pages_for(model.config, PAGE_SIZE), n_free))))


def rolled(model):
    """The model; with when_full=roll, with a window. ValueError if the model cannot do what when_full says."""
    c, is_endless = model.config, model.config.max_positions == math.inf
    if is_endless and when_full in ('crop', 'shift'):
        raise ValueError(f"when_full={when_full} is for a context that ends, and this model sees all texts through its "
                         "window: leave when_full out")
    if when_full != 'roll' or is_endless:
        return model
    window = keep or c.block_size - n_keep
    if c.position == 'learned':
        raise ValueError("when_full=roll keeps keys and values while their positions grow, and learned positions end "
                         f"at block_size {c.block_size}: use crop or shift, or train with position=rope or alibi")
    if window < 1 or n_keep + window > c.block_size:
        raise ValueError(f"n_keep={n_keep} and keep={window} tokens, of these at least 1, must fit in {c.block_size}")
    return model.with_window(window, n_keep)


def of_template():
    """`template_kwargs` as a dict. ValueError if it is not JSON of one."""
    with suppress(ValueError, RecursionError):
        if isinstance(variables := json.loads(template_kwargs or '{}'), dict):
            return variables
    raise ValueError(f"template_kwargs must be a JSON object, such as '{{\"enable_thinking\": false}}', not "
                     f"{template_kwargs!r:.60}")


def check_settings(dev):
    """ValueError, in the words of the settings, for what is wrong whatever the model is. dev: the device picked."""
    configurator.check_range(globals(), 1, 10**6, 'num_samples', 'batch_size')
    configurator.check_range(globals(), 0, math.inf, 'max_new_tokens', 'top_k', 'seed', 'keep', 'n_keep')
    for name, values in dict(split=('', 'lines'), when_full=('auto', 'crop', 'shift', 'roll'),
                             kv_cache=('blocks', *CELLS), kv_bits=(0, 8)).items():
        if globals()[name] not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, not {globals()[name]!r}")
    of_template()
    if len(forms := [name for name in ('json_schema', 'regex', 'grammar') if globals()[name]]) > 1:
        raise ValueError(f"{' and '.join(forms)} each say what form a sample has: give one of them")
    if (system or template_kwargs) and not chat:
        raise ValueError("system and template_kwargs have an effect only in a conversation: add --chat")
    plain_model.check_sampling(temperature, top_k or None, top_p)
    if (keep or n_keep) and when_full not in ('shift', 'roll'):
        raise ValueError("keep and n_keep say what is left of a full context: give when_full=shift or roll with them")
    if debug_kv_model.wants_page() and (chat or not by_model()):
        raise ValueError("KV_DEBUG=page shows the steps of the model itself: leave out chat and what only the engine "
                         "has (decoder, weights, kv_cache, kv_bits, when_full=shift, drafts, forms)")
    check_decoder(dev)


def check_decoder(dev):
    """ValueError for settings of how a step is computed that do not exist or do not go together."""
    if compile:
        raise ValueError("leave compile out: on a CPU decoder=cpu is faster, on CUDA decoder=gpu")
    if chat and (draft or speculate not in ('auto', 'off') or kv_cache in CELLS):
        raise ValueError("chat has blocks and draws one token after the other: leave kv_cache, speculate and draft out")
    cache = ' and '.join([f'kv_cache={kv_cache}'] * (kv_cache in CELLS) + [f'kv_bits={kv_bits}'] * (kv_bits > 0)
                         + [f'when_full={when_full}'] * (when_full == 'shift') + ['chat=True'] * chat
                         + [name for name in ('json_schema', 'regex', 'grammar') if globals()[name]])
    decode.check_choice(decoder, weights, threads, dev, pick_dtype(dtype, dev), speculate, draft)
    needs_cache = decode.asked_of_the_kernel(weights, threads, speculate, draft) or cache
    if decoder not in ('auto', 'eager'):
        needs_cache = f'decoder={decoder}'
    if needs_cache and not use_cache:
        raise ValueError(f"{needs_cache} works on the cache: leave use_cache=False out")


def read_prompts():
    """The texts of the prompts: `start`, or the file it names; with split=lines each line, without the empty ones."""
    text = read_text(start[5:], '' if split else None) if start.startswith('FILE:') else start
    texts = [line for line in re.split('\r?\n', text) if line.strip()] if split else [text]
    if not any(texts):
        raise ValueError("the prompt is empty: give --start some text, or leave it out to begin with a newline")
    return texts


def unescaped_stop(tokenizer):
    r"""`stop` with \n, \t and \\ as one character each: a shell passes on two. ValueError if it can never come up."""
    end = re.sub(r'\\([nt\\])', lambda found: {'n': '\n', 't': '\t', '\\': '\\'}[found[1]], stop)
    if end != stop:
        print(rf"stop: {end!r} (\n is a newline, \t a tab, \\ a backslash)", file=sys.stderr)
    try:
        tokenizer.encode(end)
    except ValueError as e:
        raise ValueError(f"stop={stop!r} can never come up: {e}") from e
    return end


def say_what_is_cut(prompts, config):
    """Say so where prompts (token lists) are longer than the context."""
    longest, block_size = max(map(len, prompts)), config.block_size
    if n_long := sum(len(prompt) > config.max_positions for prompt in prompts):
        which = "the prompt has" if len(prompts) == 1 else f"{n_long:,} of {len(prompts):,} prompts have up to"
        sees = f"the first {n_keep} and last {block_size - n_keep}" if n_keep else f"the last {block_size}"
        print(f"{which} {longest:,} tokens, more than block_size: the model sees {sees} of them", file=sys.stderr)


if __name__ == '__main__':
    configurator.run(main)
