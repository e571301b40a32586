"""
How fast, measured here and now.

    python bench.py                          a training step, as nanoGPT's bench
    python bench.py --mode=generate          tokens/s without and with the cache, by length: a table and a PNG
    python bench.py --mode=generate --shape=S,M --json=speedup.json
    python bench.py --mode=generate --lengths=500 --batches=10        ten samples, nanoGPT's default
    python bench.py --mode=peers             the same weights in other engines: a table and a PNG (pip install -r requirements-peers.txt)
    python bench.py --mode=caches            the systems of kvcache/: many requests at once, what they share
    python bench.py --mode=memory            what the cache, and doing without it, need in memory
    python bench.py --mode=loss              what dropping context and rounding weights cost a trained model, in nats

Medians of `repeats` runs after a warm-up; what is compared takes turns within one run. Pictures go to out-bench/.
"""
import os
import platform
import statistics
import sys
import time
from json import dump

import configurator  # before torch: it says so in one line where torch is missing

# isort: split
import torch
from tqdm import tqdm

import checkpoint as checkpoints
import tokenizer as tokenizers
from batches import Batches
from device import DTYPES, autocast, pick_device, pick_dtype, synchronize
from model import GPT, GPTConfig
from speedup import PROMPT, compare_ways, draw, fed_tokens
from whole_file import replacing

mode = 'train'            # train, generate, peers, caches, memory or loss
shape = 'auto'            # S (4 x 128, block 128), M (6 x 384, 256), L (12 x 768, 1024), several as S,M; auto: as the mode has it
batch_size = 12           # rows of a training step
block_size = 0            # of the training step; 0 is the shape's own
bias = False              # in linears and layer norms?
real_data = True          # train on a prepared data set if there is one, else on random tokens
profile = False           # a torch.profiler trace of the training step, written to out-bench/trace/
compile = True            # torch.compile the model for training; on a CPU it is no faster, and left out
lengths = 'auto'          # new tokens after a prompt of 6, as 10,50; auto: as the mode has it
batches = 'auto'          # rows to generate at once; auto is 1 for generate, 1,10,32 for peers and 1,8,32 for memory
repeats = 5               # timed runs of each
max_seconds = 2.0         # of one timed run in peers mode, about: slow engines generate fewer tokens
json = ''                 # a file to write the figures of all modes but train to
png = 'auto'              # and one for their picture; auto is a name in out-bench/, '' is none
kv_cache = 'tuple'        # of generate mode: one more column, the cache as streams, unified or paged, or the tuple in kv_bits
kv_bits = 0               # 8 or 4; 0 is float32
seed = 1337               # of weights and data
device = 'auto'           # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'            # float32, bfloat16 or float16; auto goes by the device

SHAPES = {
    'S': GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=65),
    'M': GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65),
    'L': GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304),
}
OUT = 'out-bench'
EXPECTED = {  # with the default settings, on two cores
    'train': '1 minute', 'generate': '1 minute for S, 5 for M and 20 for L, and ten times that with --batches=1,10',
    'peers': '5 to 10 minutes for each of S, M and L', 'caches': '1 minute', 'memory': '5 minutes', 'loss': '5 minutes',
}
WITHIN_WINDOW = {'S': 122, 'M': 200, 'L': 50}  # new tokens that fit behind the prompt (of L, what there is time for)


def main(config):
    torch.manual_seed(seed)
    dev = pick_device('cpu' if mode in ('peers', 'caches') and device == 'auto' else device)
    if mode == 'train':
        torch.set_float32_matmul_precision('high')  # as train.py does
    amp = autocast(dev, pick_dtype(dtype, dev))
    auto_shape = {'peers': 'S,M,L', 'memory': 'S,M,L', 'caches': 'S,M'}.get(mode, 'S' if dev == 'cpu' else 'L')
    names = (auto_shape if shape == 'auto' else shape).split(',')
    known = mode in ('train', 'generate', 'peers', 'caches', 'memory', 'loss')
    if not known or set(names) - set(SHAPES) or repeats < 1 or batch_size < 1 or max_seconds <= 0:
        raise ValueError(f"mode is train, generate, peers, caches, memory or loss, shape any of {', '.join(SHAPES)}, repeats and batch_size "
                         f"at least 1, max_seconds more than 0")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be between 0 and 2**63 - 1, not {seed}")
    print(f"{describe_machine(dev)}, {pick_dtype(dtype, dev)}")
    print(f"expected time with the default settings on two cores: about {EXPECTED[mode]}", file=sys.stderr)
    if mode == 'train':
        for name in names:
            bench_train(name, dev, amp)
    elif mode == 'generate':
        bench_generate(names, dev, amp)
    elif mode == 'peers':
        bench_peers(names, dev)
    elif mode == 'caches':
        bench_caches(names, dev)
    elif mode == 'memory':
        bench_memory(names, dev)
    else:
        bench_loss(dev)


def numbers(name, text):
    """'1,10' as [1, 10]."""
    counts = [int(n) for n in text.split(',') if n.strip().isdigit() and int(n) > 0]
    if len(counts) != len(text.split(',')):
        raise ValueError(f"{name} must be positive numbers with commas between, not {text!r}")
    return counts


def picture(name):
    """Where a mode's picture goes: `png`, or the file `name` in OUT."""
    return png if png != 'auto' else in_out(name)


def in_out(name):
    os.makedirs(OUT, exist_ok=True)
    return os.path.join(OUT, name)


def write_json(**figures):
    if json:
        with replacing(json, 'w') as f:
            dump(figures, f, indent=1)


def describe_machine(dev):
    if dev.startswith('cuda'):
        what = torch.cuda.get_device_name(dev)
    else:
        what = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {dev}, {what}"


def bench_train(name, dev, amp):
    data_dir = next((d for d in ('data/openwebtext', 'data/shakespeare_char') if real_data and os.path.exists(d + '/train.bin')), None)
    chars = tokenizers.state_of_dataset(data_dir).get('chars', '') if data_dir else ''
    vocab_size = 50304 if data_dir and not chars else max(SHAPES[name].vocab_size, len(chars))
    c = GPTConfig(**vars(SHAPES[name]) | dict(bias=bias, block_size=block_size or SHAPES[name].block_size, vocab_size=vocab_size))
    model = GPT(c).to(dev)
    optimizer = model.configure_optimizers(weight_decay=1e-2, learning_rate=1e-4, betas=(0.9, 0.95), device_type=dev.split(':')[0])
    if data_dir:
        get_batch = Batches(data_dir, 'train', batch_size, c.block_size, c.vocab_size, dev, seed)
    else:
        tokens = torch.randint(c.vocab_size, (batch_size, c.block_size + 1), device=dev)
        get_batch = lambda step: (tokens[:, :-1], tokens[:, 1:])  # noqa: E731
    run = torch.compile(model) if compile and dev != 'cpu' else model

    def step(k):
        x, y = get_batch(k)
        with amp:
            loss = run(x, y)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    n_steps = 10
    for k in tqdm(range(n_steps), desc=f'{name} warm-up', leave=False, disable=None):
        step(k)
    if profile:
        from torch.profiler import tensorboard_trace_handler
        write_trace = tensorboard_trace_handler(in_out('trace'))
        with torch.profiler.profile(on_trace_ready=write_trace, record_shapes=True) as prof:
            for k in range(5):
                step(k)
        print(prof.key_averages().table(sort_by='self_cpu_time_total', row_limit=15) + f"\n{OUT}/trace")
    times = []
    for repeat in tqdm(range(repeats), desc=f'{name} training', disable=None):
        synchronize(dev)
        t0 = time.perf_counter()
        for k in range(n_steps):
            loss = step(n_steps * repeat + k)
        synchronize(dev)
        times.append((time.perf_counter() - t0) / n_steps)
    dt = statistics.median(times)
    mfu = model.estimate_mfu(batch_size, dt)
    print(f"{name}, block {c.block_size}, batch {batch_size}, {data_dir or 'random tokens'}: {dt * 1e3:.2f} ms an iteration, "
          f"{batch_size * c.block_size / dt:,.0f} tok/s, MFU {'unknown' if mfu is None else f'{mfu:.1%}'}, loss {loss:.4f}")


def bench_generate(names, dev, amp):
    """Tokens/s by length: nanoGPT's way, one sample after the other without a cache, and ours, all in one batch."""
    rows = []
    counts = numbers('lengths', '10,50,122,128,200,500' if lengths == 'auto' else lengths)
    samples = numbers('batches', '1' if batches == 'auto' else batches)
    n_tokens = len(names) * sum(samples) * sum(counts) * (1 + repeats)  # that each way generates
    with tqdm(total=n_tokens, unit='tok', leave=False, disable=None) as bar:
        for name in names:
            c = GPTConfig(**vars(SHAPES[name]) | dict(bias=bias))
            model = GPT(c).to(dev).eval()
            idx = torch.randint(c.vocab_size, (1, PROMPT), device=dev)
            with torch.no_grad(), amp:
                cache = model(idx)[2]
            layer_bytes = 2 * cache[0].k_cache.nbytes
            tqdm.write(f"\n{name}: {c.n_layer} layers of {c.n_embd}, block {c.block_size}; the cache: "
                       f"{layer_bytes / 2**20:.3g} MiB a layer, {c.n_layer * layer_bytes / 2**20:.3g} MiB in all "
                       f"({cache[0].k_cache.dtype})")
            for B in samples:
                ways = ways_to_generate(model, B)
                tqdm.write(f"{B} sample{'s' * (B > 1)}; decoder: {ways['decoder']['decoder'].name}\n{'tokens':>8}"
                           + ''.join(f'{way:>22}' for way in ways) + "   counted  tokens")
                for n in counts:
                    counted = fed_tokens(n, c.block_size, False) / fed_tokens(n, c.block_size, True)
                    row = dict(shape=name, block_size=c.block_size, samples=B, new_tokens=n, counted=counted,
                               cache_bytes=layer_bytes * c.n_layer, **compare_ways(model, idx, ways, B, n, repeats, dev, amp, bar))
                    rows.append(row)
                    tok_per_s, speedup = row['tok_per_s'], row['speedup']
                    figures = [f"{tok_per_s[way]:>9,.0f} tok/s{speedup[way]:>6.1f}x" if way in speedup else '' for way in ways]
                    differing = 'DIFFERENT: ' + ', '.join(row['differing']) if row['differing'] else 'identical'
                    tqdm.write(f"{n:>8}" + ''.join(f'{figure:>22}' for figure in figures) + f"{counted:>9.2f}x  {differing}")
    write_json(machine=describe_machine(dev), dtype=pick_dtype(dtype, dev), prompt=PROMPT, repeats=repeats, rows=rows)
    if png:
        path = picture('speedup.png')
        draw(rows, path, describe_machine(dev))
        print(f"\n{path}")


def ways_to_generate(model, B):
    """{name: arguments of generate} for B samples; those of 'no cache' are none."""
    import decode
    import kvcache
    step = decode.best(model, B)
    ways = {'no cache': {}, 'cache': dict(use_cache=True), 'decoder': dict(use_cache=True, decoder=step),
            'shift': dict(use_cache=True, decoder=step, when_full='shift')}
    if (kv_cache, kv_bits) != ('tuple', 0):
        system = kvcache.CacheDecoder(model, kv_cache, B, kv_bits)
        ways[f'{kv_cache}, {kv_bits} bits' if kv_bits else kv_cache] = dict(use_cache=True, decoder=system)
    return ways


def bench_peers(names, dev):
    import comparison
    if dev != 'cpu' or pick_dtype(dtype, dev) != 'float32':
        raise ValueError("the peers are compared on a CPU, beginning with float32 weights: leave device and dtype at auto")
    for engine, why in comparison.missing().items():
        print(f"not compared: {engine} ({why})")
    rows = []
    for name in names:
        model = model_with_varied_text(GPTConfig(**vars(SHAPES[name]) | dict(bias=bias)))
        prompts = [torch.randint(model.config.vocab_size, (B, PROMPT)) for B in numbers('batches', '1,10,32' if batches == 'auto' else batches)]
        n_new = WITHIN_WINDOW[name] if lengths == 'auto' else max(numbers('lengths', lengths))
        mine = comparison.race(name, model, prompts, n_new, repeats, max_seconds)
        print(comparison.table(mine), flush=True)
        rows += mine
        write_json(machine=describe_machine(dev), versions=comparison.versions(), missing=comparison.missing(), prompt=PROMPT, bias=bias,
                   repeats=repeats, max_seconds=max_seconds, rows=rows)  # what there is so far
    if png:
        path = picture('peers.png')
        comparison.draw(rows, path, describe_machine(dev))
        print(f"\n{path}")


def bench_caches(names, dev):
    import cache_systems
    if dev != 'cpu':
        raise ValueError("the cache systems are compared on a CPU: leave device at auto")
    rows, shared = [], []
    for name in names:
        model = model_with_varied_text(GPTConfig(**vars(SHAPES[name]) | dict(bias=bias)))
        mine = cache_systems.race(name, model, repeats)
        prompts = mine[0]['prompts']
        print(f"\n{name}: {len(prompts)} sequences of {prompts[0]} to {prompts[-1]} tokens, {mine[0]['new_tokens']} more of each\n"
              f"{'kv_cache':<10}{'kv_bits':>8}  {'':<18}{'tok/s':>8}{'time':>8}  tokens")
        for row in mine:
            print(f"{row['kv_cache']:<10}{row['kv_bits']:>8}  {'together' if row['together'] else 'one after another':<18}{row['tok_per_s']:>8,.0f}"
                  f"{row['time_over_contiguous']:>7.2f}x  {'the same' if row['same_tokens'] else 'DIFFERENT'}")
        rows += mine
        s = dict(shape=name, **cache_systems.sharing(model))
        print(f"{s['samples']} samples of a prompt of {s['prompt']} hold {s['bytes_held']:,} bytes, unshared it were {s['bytes_unshared']:,}; "
              f"of a second prompt of {s['second_prompt']} that begins alike {s['computed']} tokens were computed")
        shared.append(s)
    write_json(machine=describe_machine(dev), rows=rows, sharing=shared)


def model_with_varied_text(config):
    """Random weights. At those it begins training with a GPT repeats its last token, and comparing tokens would say little."""
    model = GPT(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'wte' not in name:
                p.add_(0.1 * torch.randn_like(p))
    return model


def bench_memory(names, dev):
    import memory
    dt, cases, rows = pick_dtype(dtype, dev), [], []
    for name in names:
        c = GPTConfig(**vars(SHAPES[name]) | dict(bias=bias))
        counts = [10, WITHIN_WINDOW[name]] if lengths == 'auto' else numbers('lengths', lengths)
        cases += [(name, c, B, n, use_cache) for B in numbers('batches', '1,8,32' if batches == 'auto' else batches)
                  for n in counts for use_cache in (False, True)]
    print(f"\n{'shape':<6}{'batch':>6}{'new tokens':>12}  {'':<10}{'peak':>14}{'its cache':>14}{'formula':>14}")
    for name, c, B, n, use_cache in tqdm(cases, desc='memory', leave=False, disable=None):
        formula = use_cache * 2 * c.n_layer * B * c.block_size * c.n_embd * DTYPES[dt].itemsize
        row = dict(shape=name, batch=B, new_tokens=n, use_cache=use_cache, formula=formula,
                   **memory.measure_apart(c, B, PROMPT, n, use_cache, dev, dt))
        rows.append(row)
        sizes = ''.join(f"{row[key] / 2**20:>10,.1f} MiB" for key in ('peak', 'cache', 'formula'))
        tqdm.write(f"{name:<6}{B:>6}{n:>12}  {'cache' if use_cache else 'no cache':<10}{sizes}")
    write_json(machine=describe_machine(dev), dtype=dt, prompt=PROMPT, rows=rows)


def bench_loss(dev):
    import likelihood
    path = (checkpoints.newest_first() or ['out/ckpt.pt'])[0]
    checkpoint = checkpoints.load(path)
    model = checkpoints.build(checkpoint, GPT, GPTConfig).eval()
    data_dir = 'data/' + checkpoint['config']['dataset']
    text = Batches(data_dir, 'val', 1, model.config.block_size, model.config.vocab_size, dev).tokens
    text = torch.from_numpy(text.astype('int64'))
    results, by_context = likelihood.compare(model, text), likelihood.loss_by_context(model, text).tolist()
    print(f"{path} on {data_dir}/val.bin, {results[0]['tokens']:,} tokens, window {model.config.block_size}")
    print(f"{'weights':<10}{'kv bits':>8}{'bytes':>7}  {'when_full':<10}{'keep':>5}{'context':>9}{'nats a token':>14}{'difference':>22}")
    for row in results:
        print(f"{row['weights']:<10}{row['kv_bits'] or 32:>8}{row['kv_bytes_a_token']:>7,}  {row['when_full']:<10}{row['keep']:>5}"
              f"{row['mean_context']:>9.1f}{row['nll']:>14.4f}"
              f"{row['difference']:>+10.5f} +- {row['standard_error']:.5f}{row['difference'] / results[0]['nll']:>+9.3%}")
    write_json(machine=describe_machine(dev), checkpoint=path, rows=results, by_context=by_context)
    if png:
        path = picture('loss_by_context.png')
        likelihood.draw(by_context, results, path)
        print(f"\n{path}")


if __name__ == '__main__':
    configurator.run(main)
