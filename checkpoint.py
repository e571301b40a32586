"""
Checkpoints: saved so that a crash cannot damage one, loaded without running anything in them, and made into models.

The keys are nanoGPT's (model, optimizer, model_args, iter_num, best_val_loss, config), so a ckpt.pt of nanoGPT loads
here, and one of ours loads there if the model is one that nanoGPT has. Ours has tokenizer, rng, scaler, threads and
seconds as well.
"""
import glob
import os
import sys
import zipfile
from dataclasses import fields

import torch

import tokenizer as tokenizers
from formats import check_vocabulary, files_of, from_pretrained
from formats.hub import GPT2_NAMES
from formats.names import GPT2
from formats.weights import check_weights, is_dense, once
from whole_file import replacing

ZIP_START = b'PK\x03\x04'
SIZES = ('n_layer', 'n_head', 'n_embd', 'block_size', 'vocab_size')  # every checkpoint's model_args must have these


def save(checkpoint, path):
    """torch.save to path. A crash or a full disk leaves the file that was there. OSError if it cannot be written."""
    try:
        with replacing(path) as f:
            torch.save(checkpoint, f)
    except (OSError, RuntimeError) as e:  # torch's zip writer raises RuntimeError when the disk is full
        why = getattr(e, 'strerror', None) or f"is the disk full? {first_line(e)}"
        stays = ": the file that was there is as it was" if os.path.exists(path) else ''
        raise OSError(f"{path} could not be written ({why}){stays}") from e


def first_line(e):
    """The first line of the text of an exception, at most 200 characters; its type if it has no text."""
    return (str(e).splitlines() or [type(e).__name__])[0][:200]


def load(path):
    """The checkpoint at path, on the CPU: tensors and plain values. ValueError if missing, damaged or no checkpoint."""
    if not os.path.isfile(path):
        folder, advice = os.path.dirname(path), "train one first, with python train.py config/train_shakespeare_char.py"
        if os.path.isfile(folder):
            advice = f"{folder} is a file, and out_dir is the folder that a run has made"
        elif os.path.exists(os.path.join(folder, 'config.json')):
            advice = f"{folder} is a model in Hugging Face format: give it as --init_from={folder}"
        elif found := newest_first():
            advice = f"there is {', '.join(found[:5])}: give the folder of one as --out_dir"
        raise ValueError(f"no checkpoint {path}: {advice}")
    with open(path, 'rb') as f:
        try:
            check_bytes(f)
            f.seek(0)
            checkpoint = torch.load(f, map_location='cpu', weights_only=True)
        except MemoryError:
            raise
        except Exception as e:  # zip errors, unpickling errors, EOFError and others: all mean that the file is damaged
            reason = first_line(e) if isinstance(e, ValueError) else type(e).__name__
            raise ValueError(f"{path} cannot be read ({reason}): it is damaged, or holds more than tensors and "
                             "plain values; use another copy, or train again") from e
    try:
        check_contents(checkpoint)
    except ValueError as e:
        raise ValueError(f"{path} is not a checkpoint of train.py: {e}") from e
    return checkpoint


def check_bytes(f):
    """
    Compare the bytes of every entry of the zip file f with the CRC in the file, which torch does not. An entry that is
    marked as a folder is refused too: torch takes it for an empty one, and returns uninitialised memory.
    """
    start = f.read(len(ZIP_START))
    if start != ZIP_START:
        raise ValueError(f"it begins with {start!r}, but a checkpoint is a zip file and begins with {ZIP_START!r}")
    with zipfile.ZipFile(f) as archive:
        if any(entry.external_attr for entry in archive.infolist()):
            raise ValueError("it has an entry with attributes, which torch does not write")
        damaged = archive.testzip()
        if damaged:
            raise ValueError(f"the bytes of its entry {damaged} are not those that were saved")


def check_contents(checkpoint):
    """ValueError unless a checkpoint has a model and model_args, and values of the types that train.py saves."""
    if not isinstance(checkpoint, dict):
        raise ValueError(f"it must be a dict, but is of type {type(checkpoint).__name__}")
    if not {'model', 'model_args'} <= set(checkpoint):
        keys = ', '.join(map(str, checkpoint)) or 'no keys'
        raise ValueError(f"it must have the keys model and model_args, but has {keys[:100]}")
    wanted = dict.fromkeys(('model', 'model_args', 'optimizer', 'config', 'tokenizer', 'rng', 'scaler'), dict)
    for key, kind in {**wanted, 'iter_num': int, 'threads': int, 'seconds': float}.items():
        if key in checkpoint and not isinstance(checkpoint[key], kind):
            raise ValueError(f"its {key} must be of type {kind.__name__}, not {type(checkpoint[key]).__name__}")
    if checkpoint.get('iter_num', 0) < 0:
        raise ValueError(f"its iter_num must be 0 or more, not {checkpoint['iter_num']}")
    if not all(isinstance(name, str) and is_dense(w) for name, w in checkpoint['model'].items()):
        raise ValueError("its model must be a dict of names and dense tensors")
    if checkpoint.get('tokenizer'):
        tokenizers.check_state(checkpoint['tokenizer'])


def newest_first():
    """The paths of all out*/ckpt.pt, the one that was written last first."""
    return sorted(glob.glob('out*/ckpt.pt'), key=os.path.getmtime, reverse=True)


def model_args(config):
    """
    The fields of a GPTConfig, to be saved. nanoGPT's GPTConfig accepts no other names than its own. So if all other
    fields have their defaults, nanoGPT's alone are saved.
    """
    args = {f.name: getattr(config, f.name) for f in fields(config)}
    of_nanogpt = {name: args[name] for name in (*SIZES, 'dropout', 'bias')}
    return of_nanogpt if type(config)(**of_nanogpt) == config else args


def build(checkpoint, GPT, GPTConfig, **override_args):
    """
    The checkpoint's model: GPT(GPTConfig(its model_args, and override_args)) with its weights. Keys of model_args that
    GPTConfig does not have are left out, which stderr says. ValueError if model_args are incomplete or do not fit the
    weights.
    """
    known = {f.name for f in fields(GPTConfig)}
    if unknown := sorted(map(str, {*checkpoint['model_args']} - known)):
        print(f"model_args of the checkpoint have {', '.join(unknown)}, which GPTConfig lacks: the model may "
              "compute something else than when it was trained", file=sys.stderr)
    args = {k: v for k, v in checkpoint['model_args'].items() if k in known} | override_args
    missing = [name for name in SIZES if name not in args]
    if missing:
        raise ValueError(f"the checkpoint's model_args lack {', '.join(missing)}: it cannot be built")
    try:
        config = GPTConfig(**args)
        check_weights(config, GPT2, once(checkpoint['model'].items()))
        model = GPT(config)
        model.load_state_dict(checkpoint['model'])
    except (ValueError, RuntimeError) as e:
        raise ValueError(f"the checkpoint's model_args and weights do not fit: {' '.join(str(e).split())[:300]}") from e
    return model


def load_model(init_from, out_dir, gpt, device='cpu', dtype=None, weights='float32'):
    """
    (model in eval mode on device, its tokenizer, the folder where files made from it belong), and a line on stderr that
    says what was loaded.

    init_from: 'resume' loads out_dir/ckpt.pt, or the newest out*/ckpt.pt if out_dir is ''. Anything else is the out_dir
        of a run, or a model of another project: a name on the hub, the name of a GPT-2, a folder in Hugging Face format
        or a GGUF file.
    gpt: the module whose GPT and GPTConfig are used, model or debug_kv_model.
    dtype: of the weights of such a model, see `formats.from_pretrained`. weights: how the decoder reads them. On a CPU
        all kinds but float32 are packed. Only the packing reads such weights, and it reads them one by one.

    ValueError if there is no such model or tokenizer, or if the tokenizer has more tokens than the model. Tokens that
    were added to it are no error: stderr names them, and the tokenizer refuses texts with them.
    """
    if is_run(init_from):
        init_from, out_dir = 'resume', init_from
    if init_from != 'resume':
        files, lazy = files_of(init_from), device == 'cpu' and weights != 'float32'
        state = files.tokenizer_state()
        if state['kind'] == 'unknown':
            raise ValueError(f"{init_from} has no tokenizer.json: these tokens have no text")
        model = from_pretrained(gpt.GPT, gpt.GPTConfig, files, {}, dtype, lazy)
        tokenizer = tokenizers.from_state(state)
        what, folder = init_from, out_dir or 'out-' + name_of(init_from)
    else:
        path = os.path.join(out_dir, 'ckpt.pt') if out_dir else (newest_first() or ['out/ckpt.pt'])[0]
        checkpoint = load(path)
        model, tokenizer = build(checkpoint, gpt.GPT, gpt.GPTConfig), tokenizer_of(checkpoint)
        what, folder = f"{path}: iteration {checkpoint.get('iter_num', '?')}", os.path.dirname(path)
    check_vocabulary(model, tokenizer)
    tokenizer.n_rows = n = model.config.vocab_size
    if tokenizer.vocab_size > n:
        print(f"the tokenizer has {tokenizer.vocab_size:,} tokens, and the model {n:,}: texts with "
              f"{tokenizer.decode(range(n, tokenizer.vocab_size))[:60]!r} are refused", file=sys.stderr)
    n_params, block_size = model.get_num_params(), model.config.block_size
    print(f"{what}, {n_params / 1e6:.2f}M parameters, block_size {block_size}", file=sys.stderr)
    return (model if device == 'cpu' else model.to(device)).eval(), tokenizer, folder


def name_of(init_from):
    """The name of a model of another project: that of its folder, or of its file without .gguf."""
    return os.path.basename(os.path.abspath(init_from)).removesuffix('.gguf')


def load_draft(draft, gpt, target, tokenizer):
    """
    The model that a setting `draft` names: a folder with a ckpt.pt, or what `load_model` takes as init_from. It gets as
    many rows as target has: its last row is repeated, or rows are cut off. ValueError if its tokenizer is not target's.
    """
    model, its_tokenizer, _ = load_model(draft, '', gpt)
    if not tokenizers.same_ids(tokenizer, its_tokenizer):
        raise ValueError(f"draft={draft} has another tokenizer than the model: take a draft with the model's")
    n, own = target.config.vocab_size, model.config.vocab_size
    if n != own:
        model.config.vocab_size, rows = n, torch.arange(n).clamp(max=own - 1)
        for part in (model.transformer.wte, model.lm_head):
            part.weight = torch.nn.Parameter(part.weight.detach()[rows])
        if model.config.tied:
            model.transformer.wte.weight = model.lm_head.weight
    return model if model.lm_head.weight.dtype is torch.bfloat16 else model.float()


def is_run(name):
    """Is this the out_dir of a training run?"""
    return os.path.exists(os.path.join(name, 'ckpt.pt'))


def tokenizer_named(name):
    """
    The tokenizer of the out_dir of a run, of a folder with a tokenizer.json or a data set, of a tokenizer.json, or of
    a model that init_from names. ValueError if there is none.
    """
    folder = os.path.dirname(os.path.abspath(name)) if os.path.basename(name) == 'tokenizer.json' else name
    if is_run(name):
        return tokenizer_of(load(os.path.join(name, 'ckpt.pt')))
    if name in GPT2_NAMES and not os.path.exists(name):  # its byte pairs need no download of the model
        return tokenizers.from_state(tokenizers.GPT2)
    has_files = any(os.path.exists(os.path.join(folder, file)) for file in ('tokenizer.json', 'meta.json'))
    return tokenizers.from_state(
        tokenizers.state_of_dataset(folder) if has_files else files_of(name).tokenizer_state())


def tokenizer_of(checkpoint):
    """The tokenizer in the checkpoint. An old checkpoint has none: then that of its data folder, or else GPT-2's."""
    if checkpoint.get('tokenizer'):
        return tokenizers.from_state(checkpoint['tokenizer'])
    folder = os.path.join('data', str(checkpoint.get('config', {}).get('dataset', '')))
    return tokenizers.from_state(tokenizers.state_of_dataset(folder))
