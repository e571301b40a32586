"""
Checkpoints of a sharded model: a folder `ckpt` in out_dir, to which each process writes its part.

    ckpt/index.json                     what else a ckpt.pt has, all tensors' shapes, and the files with their CRCs
    ckpt/<its name>/shard-*.safetensors   the rows that one process has, of weights and optimizer state

torch.distributed.checkpoint writes and reads the tensors, for any number of processes. Its own file of metadata is a
pickle, which could run code when it is read; its reader and writer of safetensors files need none, and so this format
has none. A save makes a new folder of shards. index.json, which names it, is replaced at the end, as a whole: until
then the checkpoint is the one before.
"""
import glob
import json
import math
import os
import re
import shutil
import warnings
import zlib
from dataclasses import fields

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

import checkpoint as checkpoints
from device import meta_model
from training import checkpointer
from training.checkpointer import Checkpointer
from training.parallel import agree, all_say, first_says
from whole_file import replacing

FOLDER, INTERRUPTED, INDEX = 'ckpt', 'ckpt_interrupted', 'index.json'
SHARDS = re.compile(r'\d{8,}-[0-9a-f]{8}')  # the name of a folder of shards: the iteration, and a random number
DTYPES = {str(dtype).removeprefix('torch.'): dtype
          for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)}


def exists(folder):
    return os.path.isfile(os.path.join(folder, INDEX))


def named_tensors(weights, optimizer_state):
    """
    {name: tensor} of all that a checkpoint has of tensors: `model.` and a parameter's name; and `optimizer.`, the
    parameter's number and the name of the state. weights: a tied one once; optimizer_state: {number: {name: tensor}}.
    """
    return {'model.' + name: w.detach() for name, w in weights.items()} | {
        f'optimizer.{number}.{name}': torch.as_tensor(x).detach()
        for number, state in optimizer_state.items() for name, x in state.items()}


def sharded_weights(model):
    """{name: DTensor} of a sharded model's parameters, a tied one once."""
    weights = model.state_dict()  # what is gathered at the moment is sharded again by this
    return {name: weights[name] for name, _ in model.named_parameters()}


def write(folder, contents, tensors):
    """
    Write a checkpoint to `folder`, and then remove the one that was there. All processes of a group call it.

    contents: what goes into index.json, of process 0; tensors: those of `named_tensors`, DTensors or whole tensors.
    ValueError in all processes if it cannot be written, or if process 0 does not see the files of the others.
    """
    name = first_says(f"{contents['iter_num']:08d}-{os.urandom(4).hex()}")
    shards, (rank, _) = os.path.join(folder, name), rank_and_size()
    own, error = {}, None
    try:
        with warnings.catch_warnings():  # torch warns that one process has no group
            warnings.simplefilter('ignore', UserWarning)
            dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(shards, save_distributed=True),
                     no_dist=not dist.is_initialized())
        own = {file: size_and_crc(os.path.join(shards, file))
               for file in sorted(glob.glob(f'shard-{rank + 1:05d}-*.safetensors', root_dir=shards))}
    except (CheckpointException, OSError, RuntimeError) as e:
        error = f"{shards} could not be written, is the disk full? ({reason_of(e)})"
    agree(error)
    files = {file: of for each in all_say(own) for file, of in each.items()}
    if rank == 0 and not all(os.path.exists(os.path.join(shards, file)) for file in files):
        error = f"process 0 does not see all of {shards}: out_dir must be a folder that all nodes share"
    agree(error)
    if rank == 0:
        described = {name: [str(x.dtype).removeprefix('torch.'), *x.shape] for name, x in tensors.items()}
        with replacing(os.path.join(folder, INDEX), 'w', encoding='utf-8') as f:
            json.dump({'checkpoint': contents, 'tensors': described, 'shards': name, 'files': files}, f)
        remove_leftovers(folder)
    if dist.is_initialized():
        dist.barrier()


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def size_and_crc(path):
    """[bytes of a file, CRC-32 of them]"""
    size = crc = 0
    with open(path, 'rb') as f:
        while chunk := f.read(1 << 22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def reason_of(e):
    """`first_line` of an exception; of a CheckpointException, that of the first process that failed."""
    if isinstance(e, CheckpointException):
        e = next(iter(e.failures.values()))[0]
    return checkpoints.first_line(e)


def remove_leftovers(folder):
    """Remove what index.json does not name: older shards, and those of runs that were killed while they saved."""
    current = read_index(folder)['shards'] if exists(folder) else None
    for name in os.listdir(folder):
        if SHARDS.fullmatch(name) and name != current:
            shutil.rmtree(os.path.join(folder, name))
        elif name.startswith(INDEX + '.') and name.endswith('.tmp'):
            os.remove(os.path.join(folder, name))


def read_index(folder):
    """
    index.json of a checkpoint, with what is in ['checkpoint'] as in a ckpt.pt. ValueError if it is none, or damaged.
    """
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        raise ValueError(f"no {path}, so {folder} is not a sharded checkpoint: train one first, with --parallel=fsdp")
    try:
        with open(path, encoding='utf-8') as f:
            index = json.load(f)
        kinds = {'checkpoint': dict, 'tensors': dict, 'shards': str, 'files': dict}
        if not isinstance(index, dict) or any(not isinstance(index.get(key), kind) for key, kind in kinds.items()):
            raise ValueError(f"it must have {', '.join(kinds)}")
        if not SHARDS.fullmatch(index['shards']):
            raise ValueError(f"its shards are {index['shards'][:50]!r}, no name that train.py gives (they are like "
                             "00000010-0123abcd)")
        for name, (dtype, *shape) in index['tensors'].items():
            if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{name} is described as {[dtype, *shape]}, not as a dtype and sizes, such as "
                                 "['float32', 4, 4]")
        if any(os.path.basename(file) != file for file in index['files']):
            raise ValueError("its files must be names without a folder")
        contents = index['checkpoint']
        for part in ('model_args', 'config', *contents['optimizer']['param_groups']):  # JSON has no tuples
            values = contents[part] if isinstance(part, str) else part
            values.update({k: tuple(v) for k, v in values.items() if isinstance(v, list) and k != 'params'})
        checkpoints.check_contents(contents | {'model': {}})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        reason = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise ValueError(f"{path} cannot be read ({reason[:200]}): it is damaged; use another copy") from e
    return index


def check_files(folder, index):
    """
    ValueError in all processes, which share the work, unless the files of a checkpoint are those that were saved.
    """
    rank, size = rank_and_size()
    error, shards = None, os.path.join(folder, index['shards'])
    if os.path.isdir(shards) and not {name for name in os.listdir(shards) if name.endswith('.safetensors')} <= {
            *index['files']}:
        error = f"{shards} has files that {folder}/{INDEX} does not name: use another copy"
    for file in sorted(index['files'])[rank::size]:
        path = os.path.join(shards, file)
        if not os.path.isfile(path):
            error = f"{path} is missing: every node must see the whole of {folder}"
        elif size_and_crc(path) != index['files'][file]:
            error = f"{path} is damaged, its bytes are not those that were saved: use another copy"
    agree(error)


def read(folder, index, tensors):
    """
    Read a checkpoint into `tensors`, DTensors or whole ones, in place. All processes of a group call it. ValueError if
    the checkpoint is damaged, or has other names and shapes.
    """
    saved = {name: shape for name, (_, *shape) in index['tensors'].items()}
    check_shapes(folder, saved, {name: [*x.shape] for name, x in tensors.items()})
    check_files(folder, index)
    reader = HuggingFaceStorageReader(os.path.join(folder, index['shards']))
    try:
        with warnings.catch_warnings():  # torch warns that one process has no group
            warnings.simplefilter('ignore', UserWarning)
            dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, Exception) as e:  # a header that says something else than index.json
        raise ValueError(f"{folder} cannot be read ({reason_of(e)}): it is damaged; use another copy") from e


def check_shapes(folder, saved, wanted):
    """ValueError unless the shapes in a checkpoint, {name: [rows, ...]}, are those of the model."""
    for name in sorted({**saved, **wanted}):
        if saved.get(name) != wanted.get(name):
            raise ValueError(f"{folder} does not fit the model: {name} is {saved.get(name, 'missing')} in it, and must "
                             f"be {wanted.get(name, 'missing')}")


def build(folder, index, GPT, GPTConfig, **override_args):
    """GPT(GPTConfig(model_args, and override_args)), as at the start of a run. ValueError if the shapes do not fit."""
    saved = index['checkpoint']['model_args']
    known = {f.name for f in fields(GPTConfig)}
    try:
        config = GPTConfig(**({k: v for k, v in saved.items() if k in known} | override_args))
        shapes = {'model.' + name: [*p.shape] for name, p in meta_model(GPT, config).named_parameters()}
    except (TypeError, RuntimeError, ValueError) as e:
        raise ValueError(f"{folder} has model_args that make no model: {e}") from e
    saved = {name: shape for name, (_, *shape) in index['tensors'].items() if name.startswith('model.')}
    check_shapes(folder, saved, shapes)
    return GPT(config)


def load_furthest(out_dir):
    """(index, folder): out_dir/ckpt, or ckpt_interrupted if that is further along. ValueError if there is none."""
    folder, interrupted = os.path.join(out_dir, FOLDER), os.path.join(out_dir, INTERRUPTED)
    if not exists(folder) and os.path.exists(os.path.join(out_dir, 'ckpt.pt')):
        raise ValueError(f"{out_dir} has a ckpt.pt, which one process reads whole: go on without --parallel=fsdp, or "
                         f"make shards of it, with python export.py --to=shards --out_dir={out_dir}")
    found = [(read_index(each), each) for each in (folder, interrupted) if exists(each) or each == folder]
    return max(found, key=lambda pair: pair[0]['checkpoint'].get('iter_num', 0))  # of equal ones the first


def build_furthest(out_dir, GPT, GPTConfig, block_size, **override_args):
    """
    (the model that the checkpoint of `load_furthest` needs, not yet with its weights; the checkpoint, without tensors,
    for `read_into`; its folder). ValueError if it is damaged, or if block_size is less than the model's.
    """
    index, folder = load_furthest(out_dir)
    model = build(folder, index, GPT, GPTConfig, **override_args)
    if block_size < model.config.block_size:
        raise ValueError(f"block_size {block_size} is less than the {model.config.block_size} of {folder}, and a "
                         "sharded model is not cut: resume it in one process, with python export.py --to=ckpt "
                         f"--out_dir={out_dir} and without --parallel=fsdp")
    return model, index['checkpoint'] | {'shards': (folder, index)}, folder


def optimizer_state(tensors):
    """{number: {name: tensor}} of the optimizer's tensors among those of `named_tensors`."""
    state = {}
    for name, x in tensors.items():
        kind, number, key = name.split('.', 2)
        if kind == 'optimizer':
            state.setdefault(int(number), {})[key] = x
    return state


def read_into(model, optimizer, resumed):
    """
    Read the checkpoint of `build_furthest` into a sharded model, in place. Its optimizer state comes into
    resumed['optimizer'], as a state_dict with tensors that are sharded as their parameters are. All processes of a
    group call it; ValueError as in `read`.
    """
    folder, index = resumed.pop('shards')
    params = dict(enumerate(p for group in optimizer.param_groups for p in group['params']))
    tensors = {'model.' + name: w for name, w in sharded_weights(model).items()}
    for name, (dtype, *shape) in index['tensors'].items():
        if name not in tensors:
            p = params.get(int(name.split('.')[1]))
            tensors[name] = torch.zeros(shape, dtype=DTYPES[dtype])
            if p is not None and [*p.shape] == shape:
                tensors[name] = torch.zeros_like(p.detach(), dtype=DTYPES[dtype])
    read(folder, index, tensors)
    resumed['optimizer']['state'] = optimizer_state(tensors)


class ShardedCheckpointer(Checkpointer):
    """A Checkpointer of a sharded model, whose checkpoints are folders. All processes save, each its part."""

    names = FOLDER, INTERRUPTED
    saves = True

    def agreed(self, value):
        return first_says(value)

    def exists(self, path):
        return exists(path)

    def write(self, path, iter_num, best_val_loss):
        weights, optimizer = sharded_weights(self.model), self.optimizer.state_dict()
        if not all(all_say(all(bool(w.to_local().isfinite().all()) for w in weights.values()))):
            raise FloatingPointError("the weights are not finite and were not saved")
        contents = self.contents(iter_num, best_val_loss)
        write(path, contents | {'optimizer': {'param_groups': optimizer['param_groups']}},
              named_tensors(weights, optimizer['state']))

    def remove(self, path):
        if self.writes and os.path.isdir(path):
            if exists(path):
                os.remove(os.path.join(path, INDEX))  # first: without it the folder is no checkpoint
            shutil.rmtree(path)

    def remove_leftovers(self, path):
        if os.path.isdir(path):
            remove_leftovers(path)


def check_older(path, iter_num, new_iter_num):
    """ValueError if the checkpoint at path, of iteration iter_num, is further along than the one that replaces it."""
    if iter_num > new_iter_num:
        raise ValueError(f"{path} is at iteration {iter_num}, further along than the one that would replace it, which "
                         f"is at {new_iter_num}: move {path} away first if it is not needed")


def to_ckpt(out_dir, GPT, GPTConfig):
    """
    Write the ckpt.pt of the sharded checkpoint in out_dir. Returns (its path, its iteration). The caller locks out_dir.
    ValueError if there is one that is further along.
    """
    index, folder = load_furthest(out_dir)
    checkpoint, path = index['checkpoint'], os.path.join(out_dir, 'ckpt.pt')
    if os.path.exists(path):
        before, before_path = checkpointer.load_furthest(out_dir, 'cpu')
        check_older(before_path, before.get('iter_num', 0), checkpoint['iter_num'])
    model = build(folder, index, lambda config: meta_model(GPT, config), GPTConfig)
    tensors = {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, (dtype, *shape) in index['tensors'].items()}
    read(folder, index, tensors)
    embedding = tensors['model.transformer.wte.weight']  # a tied lm_head is the same tensor
    checkpoint['model'] = {name: tensors.get('model.' + name, embedding) for name in model.state_dict()}
    checkpoint['optimizer']['state'] = optimizer_state(tensors)
    checkpoints.save(checkpoint, path)
    return path, checkpoint['iter_num']


def to_shards(out_dir, GPT, GPTConfig):
    """
    Write the sharded checkpoint, of one shard, of the ckpt.pt in out_dir. Returns (its path, its iteration). The caller
    locks out_dir. ValueError if there is one that is further along.
    """
    checkpoint, path = checkpointer.load_furthest(out_dir, 'cpu')
    folder = os.path.join(out_dir, FOLDER)
    if checkpointer.optimizer_of(checkpoint, path) == 'muon':
        raise ValueError(f"{path} was saved with optimizer=muon, which needs whole matrices, not shards: resume it "
                         "without --parallel=fsdp")
    if exists(folder):
        before, before_folder = load_furthest(out_dir)
        check_older(before_folder, before['checkpoint'].get('iter_num', 0), checkpoint.get('iter_num', 0))
    weights = dict(checkpoints.build(checkpoint, GPT, GPTConfig).named_parameters())
    optimizer = checkpoint['optimizer']
    kept = 'model_args', 'config', 'tokenizer', 'scaler'
    contents = {key: value for key, value in checkpoint.items() if key in kept}
    contents |= {'iter_num': checkpoint.get('iter_num', 0), 'optimizer': {'param_groups': optimizer['param_groups']},
                 'best_val_loss': float(checkpoint.get('best_val_loss', math.inf))}
    write(folder, contents, named_tensors(weights, optimizer['state']))
    return folder, contents['iter_num']
