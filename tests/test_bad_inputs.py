"""What a user can get wrong, and the one line that says so. Exit code 2, no traceback, nothing lost."""
import json
import shutil
from importlib.util import find_spec

import torch
from conftest import SERVING, TINY, run

TRAIN = [  # settings, what the line has to say
    ('--batchsize=3', "unknown setting 'batchsize' (command line): did you mean batch_size?"),
    ('--n_embd=15', 'n_embd 15 must be divisible by n_head 2'),
    (f'--n_embd={2**62}', 'n_embd must be a positive integer up to 16,777,216'),
    ('--batch_size=0', 'batch_size must be at least 1'),
    ('--grad_clip=-1', 'grad_clip must be at least 0, not -1'),
    ('--seed=-1', 'seed must be at least 0, not -1'),
    ('--backend=foo', "backend must be auto, nccl or gloo, not 'foo'"),
    ('--device=cuda:99', 'cuda:99 was asked for'),
    ('--device=tpu', 'device must be auto'),
    ('--dtype=int8', 'dtype must be auto'),
    ('--dataset=nowhere', 'no data/nowhere/train.bin, and no data/nowhere/prepare.py to make it'),
    ('--beta1=1.0', 'beta1 must be from 0 to 0.999999, not 1.0'), ('--out_dir=', "out_dir must be a folder, not ''"),
    ('--block_size=100000', 'prepare more text or lower block_size'),
    ('--init_from=resume --out_dir=nowhere', 'no checkpoint nowhere/ckpt.pt'),
    ('--init_from=resume --out_dir=damaged', 'damaged/ckpt.pt cannot be read'),
    ('--init_from=resume --out_dir=weightsonly', 'no optimizer state'),
    ('--dataset=openwebtext --n_layer=300 --n_embd=1536', 'no data/openwebtext/train.bin'),  # before a model is built
    ('--init_from=gpt3', 'no file and no folder here: give gpt2, gpt2-medium'),
    ('--init_from=out-x/model.gguf', 'no file and no folder'), ('--init_from=out-x/ckpt.pt', 'no file and no folder'),
    ('--out_dir=train.py', "out_dir must be a folder, not 'train.py'"),
    ('--max_minutes=1 --warmup_iters=9 --lr_decay_iters=9', 'lr_decay_iters 9 is not more than warmup_iters 9'),
    ('--wandb_log=True', 'pip install wandb'),
]
SAMPLE = [
    ('--out_dir=nowhere', 'no checkpoint nowhere/ckpt.pt: there is out/ckpt.pt: give the'),
    ('--out_dir=train.py', 'train.py is a file, and out_dir is the folder that a run has made'),
    ('--out_dir=damaged', 'damaged/ckpt.pt cannot be read'),
    ('--init_from=gpt2', 'gpt2 could not be downloaded'),
    ('--start=日本', "characters the model never saw: '日' '本'"),
    ('--stop=日', "stop='日' can never come up: characters the model never saw"),
    ('--when_full=roll', 'learned positions end at block_size'),
    ('--when_full=shift --keep=99', 'n_keep=0 and keep=99 tokens of a full context'),
    ('--draft=nowhere', 'no file and no folder here: give gpt2'),
    ('--chat', 'this model has no chat, because its tokenizer has no chat template: leave out --chat'),
]
SAMPLE_BEFORE_A_MODEL = [  # found out where there is no model
    ('--start=', 'the prompt is empty'),
    ('--split=lines', 'the prompt is empty'),
    ('--split=words', "split must be one of '', 'lines', not 'words'"),
    ('--system=x', 'have an effect only in a conversation: add --chat'),
    ('--start=FILE:nowhere.txt', 'nowhere.txt'),
    ('--start=FILE:binary.txt', 'binary.txt is not UTF-8'),
    ('--temperature=-1.0', 'temperature must be 0 (greedy) or positive'),
    ('--top_k=-1', 'top_k must be at least 0, not -1'),
    ('--top_p=1.5', 'top_p must be in (0, 1]'),
    ('--max_new_tokens=-1', 'max_new_tokens must be at least 0'),
    ('--num_samples=0', 'num_samples must be from 1 to 1,000,000, not 0'),
    ('--seed=-1', 'seed must be at least 0, not -1'),
    (f'--seed={2**63}', 'seed must fit in 64 bits'),
    ('--when_full=slide', "when_full must be one of 'auto', 'crop', 'shift', 'roll', not 'slide'"),
    ('--when_full=shift --keep=-1', 'keep must be at least 0'),
    ('--keep=10', 'say what is left of a full context: give when_full=shift or roll with them'),
    ('--compile=True', 'leave compile out: on a CPU decoder=cpu is faster, on CUDA decoder=gpu'),
    ('--decoder=compiled', "decoder must be auto, eager, cpu or gpu, not 'compiled'"),
    ('--decoder=gpu', 'decoder=gpu is for CUDA, but the device is cpu: use device=cuda, or leave it out'),
    ('--decoder=fast', "decoder must be auto, eager, cpu or gpu, not 'fast'"),
    ('--threads=-1', 'threads must be positive'),
    ('--weights=int2', 'weights must be float32, bfloat16, int8 or int4'),
    ('--weights=int8 --decoder=eager', 'weights=int8 is for the cpu decoder: leave decoder=eager out'),
    ('--speculate=int2', 'speculate must be auto, off, int4, int8, ngram'),
    ('--speculate=int4 --use_cache=False', 'speculate=int4 works on the cache: leave use_cache=False out'),
    ('--draft=out --speculate=int4', 'both say who proposes tokens: a draft takes speculate=auto'),
    ('--chat=True --speculate=int4', 'and draws one token after the other: leave kv_cache, speculate and'),
    ('--chat --num_samples=3 --stop=x', 'a conversation takes no num_samples and no stop: leave that out'),
    ('--weights=int8 --use_cache=False', 'weights=int8 works on the cache: leave use_cache=False out'),
    ('--weights=int8 --dtype=bfloat16', 'but not dtype=bfloat16'),
    ('--kv_cache=pages', "kv_cache must be one of 'blocks', 'streams', 'unified', not 'pages'"),
    ('--kv_cache=streams --use_cache=False', 'kv_cache=streams works on the cache: leave use_cache=False out'),
    ('--when_full=shift --use_cache=False', 'when_full=shift works on the cache: leave use_cache=False out'),
    ('--regex=a+ --use_cache=False', 'regex works on the cache: leave use_cache=False out'),
    ('--kv_bits=4', 'kv_bits must be one of 0, 8, not 4'),
]
OTHERS = [
    ('data/shakespeare_char/prepare.py', '--input=nowhere.txt', 'nowhere.txt'),
    ('data/shakespeare_char/prepare.py', '--input=binary.txt', 'binary.txt is not UTF-8'),
    ('data/shakespeare_char/prepare.py', '--input=empty.txt', 'empty.txt is empty'),
    ('data/openwebtext/prepare.py', '', 'pip install datasets'),
    ('data/shakespeare/prepare.py', '--input=train.py --vocab_size=256', 'vocab_size must be from 257'),
    ('data/shakespeare/prepare.py', '--input=train.py --vocab_size=9999999', '262,144'),
    ('data/shakespeare/prepare.py', '--input=train.py --tokenizer=nowhere', 'no file and no folder here'),
    ('bench.py', '--mode=fast', 'mode must be one of generate, train, peers, serve, loss, eval, gpu'),
    ('bench.py', '--shape=XL', 'any of S, M, L'),
    ('bench.py', '--seed=-1', 'seed must be at least 0'),
    ('bench.py', '--mode=generate --lengths=a,b', 'lengths must be positive numbers up to 999,999'),
    ('bench.py', '--mode=peers --batches=1,zero', 'batches must be positive numbers'),
    ('bench.py', '--mode=peers --dtype=bfloat16', 'leave device and dtype at auto'),
    ('bench.py', '--mode=peers --shape=S --lengths=500', 'do not fit into block_size 128'),
    ('bench.py', '--mode=generate --shape=smollm2', 'any of S, M, L in generate mode'),
    ('bench.py', '--mode=peers --only=decoding,none', "decoding, prefill; not 'decoding,none'"),
    ('bench.py', '--mode=loss --text=my.txt --dtype=bfloat16', 'on a CPU in float32'),
    *(('bench.py', f'--mode={mode}', f'{mode} mode needs files to evaluate') for mode in ('loss', 'eval')),
    ('bench.py', '--mode=gpu --device=cpu', 'gpu mode measures CUDA, and the device is cpu'),
    ('test_kv_cache.py', '--new_tokens=0', 'at least 1'),
    ('test_kv_cache.py', '--decoder=fast', 'decoder must be auto, eager, cpu or gpu'),
    ('export.py', '--to=onnx', "to must be hf, or gguf with type f32 or q8_0, not 'onnx'"),
    ('export.py', '--type=q8_0', "not 'hf' with 'q8_0'"),
    ('export.py', '--out_dir=nowhere', 'no checkpoint nowhere/ckpt.pt'),
    ('export.py', '--to=gguf --path=new', 'pip install gguf'),
]
SERVE = [
    ('bench.py', '--mode=serve --lengths=5', 'leave lengths at auto'),
    ('bench.py', '--mode=serve --requests=-1', 'requests must be from'),
    ('bench.py', '--mode=serve --only=nothing', 'the parts of serve mode are clients, soak'),
    ('serve.py', '--port=0 --out_dir=nowhere', 'no checkpoint'),
    ('serve.py', '--port=0 --max_queue=0', 'max_queue must be at least 1'),
    ('serve.py', '--port=70000', 'port must be'),
    ('serve.py', '--port=0 --decoder=compiled', 'decoder must be auto, eager, cpu or gpu'),
    ('serve.py', '--port=0 --host=256.0.0.1', 'cannot be had'),
    ('serve.py', '--pord=1', 'did you mean port'),
    ('serve.py', '--port=0 --host=', 'host must be an address'),
    ('serve.py', '--port=0 --host=nowhere.invalid', 'choose another --host'),
    ('serve.py', '--port=0 --api_key=FILE:/nowhere', 'No such file'),
    ('serve.py', '--port=0 --generation_config=vllm', 'generation_config must be none'),
]
BAD = [  # each run of train.py has a folder of its own, since a second run in one is refused
    *[('train.py', [*TINY, f'--out_dir=out-{i}', *settings.split()], line) for i, (settings, line) in enumerate(TRAIN)],
    *[('sample.py', settings.split(), line) for settings, line in SAMPLE],
    *[('sample.py', ['--out_dir=nowhere', *settings.split()], line) for settings, line in SAMPLE_BEFORE_A_MODEL],
    *[(script, settings.split(), line) for script, settings, line in OTHERS + SERVE * all(map(find_spec, SERVING))],
]


# This runs many scripts in one process, one after the other, so that modules are imported once.
DRIVER = """
import io, json, os, runpy, sys, traceback
from contextlib import redirect_stderr

os.environ |= dict(HF_HUB_OFFLINE='1', HF_HOME='hf')
ended = []
for script, *settings in json.load(open('cases.json')):
    err, sys.argv, sys.path[0] = io.StringIO(), [script, *settings], script.rpartition('/')[0] or '.'
    with redirect_stderr(err):
        try:
            runpy.run_path(script, run_name='__main__')
            code = 0
        except SystemExit as e:
            code = e.code
        except BaseException:
            traceback.print_exc()
            code = 1
    ended.append((code, err.getvalue()))
json.dump(ended, open('ended.json', 'w'))
"""


def test_every_bad_input_ends_in_one_clear_line(repo, trained):
    shutil.copytree(trained / 'out', repo / 'out')
    whole = (repo / 'out' / 'ckpt.pt').read_bytes()
    for path, content in {
            'damaged/ckpt.pt': whole[:-2000], 'binary.txt': b'\xff\xfe\x00\x80', 'empty.txt': b'',
            'gguf.py': b'raise ImportError'}.items():  # as if it were not installed
        (repo / path).parent.mkdir(exist_ok=True)
        (repo / path).write_bytes(content)
    checkpoint = torch.load(repo / 'out' / 'ckpt.pt', weights_only=True)
    del checkpoint['optimizer']
    (repo / 'weightsonly').mkdir()
    torch.save(checkpoint, repo / 'weightsonly' / 'ckpt.pt')
    (repo / 'driver.py').write_text(DRIVER)
    (repo / 'cases.json').write_text(json.dumps([[script, *settings] for script, settings, _ in BAD]))
    run(repo, 'driver.py', CUDA_VISIBLE_DEVICES='', code=0)  # on a GPU other errors come first
    unclear = []
    for (script, settings, line), (code, err) in zip(BAD, json.loads((repo / 'ended.json').read_text()), strict=True):
        last = ([''] + err.strip().splitlines())[-1]
        clear = line in last and last.startswith(script.split('/')[-1] + ': error: ') and len(last) < 500
        if code != 2 or not clear or 'Traceback' in err:
            unclear.append(f"{script} {settings}, exit code {code}: {err[-2000:]}")
    assert not unclear, '\n'.join(unclear)
    assert (repo / 'out' / 'ckpt.pt').read_bytes() == whole and not (repo / 'new').exists()
    assert not any((repo / f'out-{i}').exists() for i, (_, line) in enumerate(TRAIN) if line.startswith('no data/'))
