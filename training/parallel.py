"""
Several processes train one model. With ddp each process has the whole model, with fsdp a part of each of its tensors.

All processes share the batches of an optimizer step. So in float32, without dropout, both give the losses of one
process. FSDP2 is described in arXiv:2411.00284 and in the documentation of torch.distributed.fsdp.fully_shard.
"""
import os
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from device import DTYPES, pick_device

WAYS = 'ddp', 'fsdp'
# how long a process waits for the others: the first one may prepare data, evaluate or save for hours meanwhile. (By
# default it is 30 minutes, with nccl 10.) One that has ended is noticed at once, as its connections are closed
PATIENCE = timedelta(days=365)


def check_way(way, device):
    """ValueError unless `way` is one of WAYS and can be had on this device, in this process."""
    if way not in WAYS:
        raise ValueError(f"parallel must be {' or '.join(WAYS)}, not {way!r}")
    if way == 'fsdp' and 'RANK' not in os.environ:
        raise ValueError("parallel=fsdp shares a model out among the processes that torchrun starts, and it did not "
                         "start this one: torchrun --standalone --nproc_per_node=2 train.py --parallel=fsdp")
    if way == 'fsdp' and device == 'mps':
        raise ValueError("parallel=fsdp needs device cpu or cuda, not mps: use one of these, or parallel=ddp")


def join_processes(device, backend, way, world_size):
    """The device of this process. One of several that torchrun started takes a GPU of its own and joins the group."""
    if backend not in ('auto', 'nccl', 'gloo'):
        raise ValueError(f"backend must be auto, nccl or gloo, not {backend!r}")
    dev = pick_device(device)
    if world_size == 1 and way == 'ddp':
        return dev
    on_cuda = dev.startswith('cuda')
    if backend == 'auto':
        backend = 'nccl' if on_cuda else 'gloo'
    elif backend == 'nccl' and not on_cuda:
        raise ValueError(f"backend=nccl needs device cuda, not {dev}: give --backend=gloo")
    if dev == 'cuda':
        if 'LOCAL_RANK' not in os.environ:
            raise ValueError("device=cuda needs LOCAL_RANK in the environment, and it is not set: start the processes "
                             "with torchrun, which sets it")
        local_rank, n_gpus = int(os.environ['LOCAL_RANK']), torch.cuda.device_count()
        n_processes = max(local_rank + 1, int(os.environ.get('LOCAL_WORLD_SIZE', 1)))
        if n_processes > n_gpus:
            raise ValueError(f"this node has {n_processes} processes, but {n_gpus} GPUs: give "
                             f"--nproc_per_node={n_gpus}")
        dev = f'cuda:{local_rank}'
        torch.cuda.set_device(dev)
    elif on_cuda and int(os.environ.get('LOCAL_WORLD_SIZE', world_size)) > 1:
        raise ValueError(f"device={dev} is one GPU, but this node has several processes: give --device=cuda, with "
                         "which each process takes a GPU of its own")
    store, rank, size = next(dist.rendezvous('env://'))
    store.set_timeout(PATIENCE)  # in it the others wait for the first collective operation of nccl
    # torchrun's store still has the addresses of the processes before a restart: another prefix hides them
    store = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return dev


def shard(model, device, dtype, compile):
    """
    Leave to each process its rows of each tensor of a GPT, on its device. All processes call this, with equal models.

    A block's matrices are gathered when it runs, forward or backward, and then freed. Their gradients are averaged over
    the processes, in float32, and each process keeps those of its rows. So an optimizer that is made afterwards has a
    part of the state too. With dtype bfloat16 or float16 attention and MLPs are gathered in that dtype. Everything else
    (norms of the residual stream, embeddings, and lm_head, which may be the same tensor) is gathered in float32, once a
    pass, and computed as with autocast alone. compile: whether to compile attention and MLPs.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # a second: only where it is used
    mesh = init_device_mesh(device.split(':')[0], (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if dtype != 'float32':
        policy = MixedPrecisionPolicy(DTYPES[dtype], torch.float32, cast_forward_inputs=False)
    for block in model.transformer.h:
        matrices = [block.attn, block.mlp]  # one group: gathered before the first one runs, freed after the last one
        if compile:
            for module in matrices:
                module.compile()
        fully_shard(matrices, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def whole(tensors):
    """
    {name: tensor} with the sharded tensors gathered: whole and in the memory of the CPU in process 0, None in the
    others. All processes call this. Other tensors stay as they are.
    """
    gathered = dict(tensors)
    for name, x in tensors.items():
        if hasattr(x, 'full_tensor'):  # a DTensor
            x = x.full_tensor()  # one at a time: each process has room for it
            gathered[name] = x.cpu() if dist.get_rank() == 0 else None
    return gathered


def sharded_like(p, x):
    """The tensor x, which all processes have whole, sharded as the parameter p is; x itself if p is not."""
    if not hasattr(p, 'full_tensor'):
        return x
    from torch.distributed.tensor import distribute_tensor  # here because it imports much of torch.distributed
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)  # without asking the others


def is_of_lost_process(e):
    """Does a RuntimeError of torch say that another process has ended, or does not answer?"""
    lost = (r'connection (closed|reset)|no route to host|broken pipe|timed out|timeout|remote process exited|'
            r'nccl(?! built in)')  # "doesn't have NCCL built in"
    return isinstance(e, dist.DistError) or bool(re.search(lost, str(e).lower()))


def leave():
    """
    End this process, with success, when all others are here too. It does not return: a normal end of Python would stop
    a thread of gloo that waits for Python's lock, and that aborts the process. About one in ten aborted so with sharded
    models, because their tensors keep the group alive, and some after a restart.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
