"""
Train a GPT: from scratch, from GPT-2's weights, or on from where a run stopped.

    python train.py config/train_shakespeare_char.py
    python train.py config/train_shakespeare_char.py --init_from=resume
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py --parallel=fsdp

Ctrl-C, SIGTERM and a terminal that closes save and stop; a second Ctrl-C or SIGTERM stops at once. out_dir gets
ckpt.pt, ckpt_last.pt, log.csv and loss.png.
"""
import configurator  # isort: skip

import math
import os
import shlex
import time
from contextlib import nullcontext
from dataclasses import fields

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import checkpoint as checkpoints
import device as devices
import formats
import tokenizer as tokenizers
from model import GPT, GPTConfig
from training.batches import Batches, check_tokenizer, open_tokens, prepare, vocab_size_of
from training.checkpointer import Checkpointer
from training.conversations import Conversations
from training.cpu import keep_freed_memory, use_onednn
from training.log import Log, start_wandb
from training.optimizer import check_optimizer, make_optimizer
from training.parallel import check_way, is_of_lost_process, join_processes, leave, shard
from training.resuming import load_furthest, restore, settle, settle_decays, settle_shape
from training.stopping import StopRequest

out_dir = 'out'                # where checkpoints, log.csv and loss.png go
eval_interval = 2000           # iterations between evaluations, and so between checkpoints
log_interval = 1               # iterations between rows of the log
eval_iters = 200               # batches an evaluation averages over
eval_only = False              # evaluate once, print, and stop
always_save_checkpoint = True  # as ckpt.pt, at every evaluation; False keeps the best one there
init_from = 'scratch'          # scratch, resume, the out_dir of another run, owner/name of a model on the hub, gpt2
                               # (-medium, -large, -xl), a folder in Hugging Face format, or a GGUF file
wandb_log = False              # log to Weights & Biases as well
wandb_project = 'owt'          # its project there
wandb_run_name = 'gpt2'        # its name there
dataset = 'openwebtext'        # a folder in data/
gradient_accumulation_steps = 40  # batches per optimizer step, over all processes
batch_size = 12                # rows of a batch; times gradient_accumulation_steps for the optimizer
block_size = 1024              # tokens of a row
n_layer = 12                   # blocks
n_head = 12                    # heads of a block
n_embd = 768                   # channels
dropout = 0.0                  # 0 for pretraining, 0.1 or more for finetuning
bias = False                   # in linears and layer norms?
position = 'learned'           # how the model knows where a token is: learned, rope (rotary), alibi or none
rope_theta = 10000.0           # the base of rotary positions
n_kv_head = 0                  # heads of keys and values, each for n_head / n_kv_head queries; 0 is n_head
window = 0                     # tokens that a token sees, itself included; 0 is all, otherwise less than block_size
n_sink = 0                     # the first tokens of a text, which every token sees in addition to its window
gelu = 'none'                  # the exact GELU, or tanh: the approximation that GPT-2 was trained with
norm = 'layer'                 # or rms, as in Llama
norm_eps = 1e-5                # what a norm adds to the variance
mlp = 'gelu'                   # or swiglu, as in Llama
n_inner = 0                    # channels inside of the MLP; 0 is 4 * n_embd
head_dim = 0                   # channels of a head; 0 is n_embd / n_head
tied = True                    # is lm_head the token embedding?
qkv_bias = False               # biases of queries, keys and values where bias is False, as in Qwen2
qk_norm = False                # norms of each head's queries and keys, as in Qwen3
rope_scaling = ()              # of rotary positions, Llama 3's: factor, low_freq_factor, high_freq_factor, block_size
optimizer = 'adamw'            # or muon: Muon for the matrices of the blocks, AdamW for the rest
learning_rate = 6e-4           # of AdamW, at its highest
muon_lr = 0.02                 # of Muon, at its highest; it rises and falls as AdamW's does
muon_weight_decay = 0.0        # of Muon's matrices
max_iters = 600000             # optimizer steps in all
max_minutes = 0.0              # ends a run of one process, in place of max_iters; after warmup_iters the learning rate
                               # then depends on the share of this time that has passed; 0 sets no limit
weight_decay = 1e-1            # of matrices and embeddings
beta1 = 0.9                    # of AdamW
beta2 = 0.95                   # of AdamW
grad_clip = 1.0                # the norm gradients are clipped to, 0.0 for none
decay_lr = True                # does the learning rate fall?
lr_schedule = 'cosine'         # down to min_lr; or wsd: stable, then linearly down to zero
cooldown_frac = 0.2            # of lr_decay_iters: the last part, in which wsd goes down
warmup_iters = 2000            # steps to get up to learning_rate
lr_decay_iters = 600000        # steps to get down to min_lr, about max_iters
min_lr = 6e-5                  # about learning_rate / 10
parallel = 'ddp'               # of several processes: ddp, each has the model; fsdp, each has a part of it
backend = 'auto'               # of their group: nccl, gloo; auto is nccl on cuda and gloo elsewhere
device = 'auto'                # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'                 # float32, bfloat16 or float16 (with loss scaling); auto goes by the device
compile = True                 # torch.compile the model; on a CPU it is no faster, and left out
onednn = False                 # on a CPU: oneDNN where it is faster, the loss in parts; last bits differ
seed = 1337                    # of the weights, the data order and dropout
peak_flops = 0.0               # what MFU is relative to; 0 looks the device up


def main(config):
    world_size, rank = int(os.environ.get('WORLD_SIZE', 1)), configurator.rank()  # of torchrun
    master = rank == 0  # the one that evaluates, logs and saves
    check_settings(world_size)
    stop = StopRequest()
    log = Log(stop, silent=not master)
    checkpointer = Checkpointer(out_dir, resume=init_from == 'resume', writes=master and not eval_only)
    try:
        train(config, world_size, rank, stop, log, checkpointer)
        if dist.is_initialized():
            leave()  # not in train(): a DDP model that is still alive ends the group while it holds Python's lock
    except RuntimeError as e:
        if world_size == 1 or not is_of_lost_process(e):
            raise
        raise ValueError(f"another process of this run has ended, or does not answer ({checkpoints.first_line(e)}); "
                         f"{checkpointer.last_good()}") from e


def train(config, world_size, rank, stop, log, checkpointer):
    """Train with the settings of this module, as process `rank` of `world_size`."""
    global max_iters
    master, max_iters = rank == 0, math.inf if max_minutes else max_iters
    dev = join_processes(device, backend, parallel, world_size)
    dt = devices.trusted_dtype(GPT, GPTConfig, dev, devices.pick_dtype(dtype, dev))
    torch.manual_seed(seed if parallel == 'fsdp' else seed + rank)
    torch.set_float32_matmul_precision('high')  # tf32 where there is tf32; sampling does without, to be exact

    data_dir = check_data(master, world_size, log.say)
    raw_model, resumed, tokenizer_state = build_model(config, data_dir, dev, log.say)
    if dev == 'cpu':
        keep_freed_memory()
        devices.share_cores()
    if onednn and dev == 'cpu':
        use_onednn(raw_model, dt)
    if parallel == 'fsdp':
        shard(raw_model, dev, dt, compile and dev != 'cpu')
    if resumed:
        settle_decays(config, resumed, log.say)
    optimizer = make_optimizer(raw_model, dev.split(':')[0], config)
    scaler = torch.amp.GradScaler(dev.split(':')[0], enabled=dt == 'float16')
    amp = devices.autocast(dev, dt)
    how = batch_size, block_size, raw_model.config.vocab_size, dev
    kind = Conversations if has_conversations(data_dir) else Batches
    train_batches = kind(data_dir, 'train', *how, seed)
    eval_batches = {split: kind(data_dir, split, *how, seed + 1) for split in ('train', 'val')}
    for split, batches in eval_batches.items():
        if kind is Conversations:
            cut = f"; {batches.n_cut:,} are longer than block_size {block_size}, and cut there" if batches.n_cut else ''
            log.say(f"{split}: {len(batches.starts):,} conversations{cut}")
    if dev == 'cpu' and not dist.is_initialized() and not eval_only:
        devices.choose_threads(lambda: trial(raw_model, optimizer, amp, train_batches), resumed.get('threads'), log.say)
    eval_model = raw_model
    if compile and parallel == 'ddp' and not dev.startswith('cpu'):  # a sharded model has compiled its blocks
        log.say("compiling the model (about a minute)")
        eval_model = torch.compile(raw_model)
    model = eval_model
    if world_size > 1 and parallel == 'ddp':  # it averages gradients over the processes, as a sharded model does
        model = DistributedDataParallel(model, device_ids=[dev] if dev.startswith('cuda') else None)
    if resumed:
        restore(resumed, optimizer, scaler)
    iter_num = first_iter = resumed.get('iter_num', 0)
    best_val_loss = resumed.get('best_val_loss', math.inf)
    began = time.monotonic() - resumed.get('seconds', 0.0)
    resumed.clear()  # frees memory: its tensors were copied into the model and the optimizer
    checkpointer.track(raw_model, optimizer, scaler, config, tokenizer_state, began, first_iter)
    try:
        if master:
            open_log(log, checkpointer, config, iter_num)
        while iter_num <= max_iters or eval_only:
            share = (time.monotonic() - began) / (60 * max_minutes) if max_minutes else 0.0
            if share >= 1:
                max_iters = iter_num
            lr = set_lr(optimizer, iter_num, share)
            evaluators = world_size if parallel == 'fsdp' else 1  # a sharded model runs in all processes at once
            if rank < evaluators and (iter_num % eval_interval == 0 or iter_num == max_iters or eval_only):
                losses = estimate_loss(eval_model, eval_batches, amp, lambda: stop.agreed(evaluators, dev))
                best_val_loss = report_and_save(log, checkpointer, iter_num, lr, losses, best_val_loss, eval_batches)
            is_done = iter_num >= max_iters and checkpointer.saved[0] == iter_num
            if stop.agreed(world_size, dev) and not is_done:
                checkpointer.stop(log, iter_num, best_val_loss)
                break
            if eval_only or iter_num >= max_iters:
                break
            loss = optimizer_step(model, optimizer, scaler, amp, train_batches, iter_num, rank, world_size)
            if master and iter_num % log_interval == 0:
                log_iteration(log, raw_model, iter_num, lr, loss, dev, world_size, train_batches)
            log.bar.update()
            iter_num += 1
    except FloatingPointError as e:
        advice = '' if eval_only else 'try lower learning rates; '
        raise ValueError(f"iteration {iter_num}, lr {lr:.2e}: {e}; {advice}{checkpointer.last_good()}") from e
    finally:
        log.close()


def check_settings(world_size):
    configurator.check_range(globals(), 1, math.inf, 'batch_size', 'gradient_accumulation_steps', 'eval_iters',
                             'eval_interval', 'log_interval')
    configurator.check_range(globals(), 0, math.inf, 'max_iters', 'max_minutes', 'seed', 'learning_rate', 'min_lr',
                             'weight_decay', 'grad_clip', 'peak_flops')
    check_optimizer(globals())
    configurator.check_range(globals(), 0, 0.999999, 'beta1', 'beta2')
    if not out_dir or os.path.exists(out_dir) and not os.path.isdir(out_dir):
        raise ValueError(f"out_dir must be a folder, not {out_dir!r}: give another name, such as --out_dir=out-mine")
    if gradient_accumulation_steps % world_size:
        raise ValueError(f"gradient_accumulation_steps {gradient_accumulation_steps} must be divisible by the "
                         f"{world_size} processes: add --gradient_accumulation_steps={world_size}, for example")
    if max_minutes and world_size > 1:
        raise ValueError(f"max_minutes needs one process, not {world_size}, whose clocks differ: give --max_iters=")
    if max_minutes and decay_lr and lr_decay_iters <= warmup_iters:
        raise ValueError(f"lr_decay_iters {lr_decay_iters} is not more than warmup_iters {warmup_iters}, but with "
                         "max_minutes the rate falls between the two: raise lr_decay_iters, or lower warmup_iters")
    if init_from == 'scratch':
        new_config(1)
    devices.pick_dtype(dtype, devices.pick_device(device))
    check_way(parallel, devices.pick_device(device))


def new_config(vocab_size):
    """The GPTConfig that the settings describe. ValueError if they do not go together."""
    named = {f.name: globals()[f.name] for f in fields(GPTConfig) if f.name in globals()}
    return GPTConfig(vocab_size=vocab_size, **named)


def set_lr(optimizer, it, share=0.0):
    """
    Set the learning rate of iteration `it`, and return it. share: the share of max_minutes that has passed. With
    max_minutes, the same share of the decay that follows the warmup is done.
    """
    if max_minutes and it >= warmup_iters:
        it = warmup_iters + min(1.0, share) * (lr_decay_iters - warmup_iters)
    lr = get_lr(it)
    for group in optimizer.param_groups:
        group['lr'] = lr if 'betas' in group else lr * (muon_lr / learning_rate)
    return lr


def get_lr(it):
    """
    Linear warmup, then nanoGPT's cosine from learning_rate down to min_lr at lr_decay_iters. Or warmup, stable, decay
    (wsd, arXiv:2404.06395): learning_rate, and in the last cooldown_frac of lr_decay_iters linearly down to zero
    (arXiv:2405.18392; train_gpt.py of github.com/KellerJordan/modded-nanogpt).
    """
    if not decay_lr:
        return learning_rate
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if lr_schedule == 'wsd':
        return learning_rate * min(1.0, max(0, lr_decay_iters - it) / (cooldown_frac * lr_decay_iters))
    if it >= lr_decay_iters:
        return min_lr
    progress = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


def check_data(master, world_size, say):
    """
    The data folder. A missing character data set is prepared first. ValueError if a token file is missing or too short.
    """
    data_dir = os.path.join('data', dataset)
    if master and dataset.endswith('_char'):
        prepare(data_dir)
    if world_size > 1:
        dist.barrier()
    is_chat = has_conversations(data_dir)
    for split in ('train', 'val'):
        open_tokens(data_dir, split, 0 if is_chat or init_from == 'resume' else block_size)
    say(f"data: {data_dir}, {tokenizers.read_meta(data_dir).get('source', 'source unknown')}")
    return data_dir


def has_conversations(data_dir):
    return 'conversations' in tokenizers.read_meta(data_dir)


def build_model(config, data_dir, dev, say):
    """
    (the model that init_from names, on the device; the checkpoint that the run is resumed from, or {}; the state of its
    tokenizer). ValueError if the data have another tokenizer. It settles block_size.
    """
    global block_size
    vocab_size, tokenizer_state = vocab_size_of(data_dir), tokenizers.state_of_dataset(data_dir)
    resumed, saved, source = {}, {}, init_from
    if init_from == 'scratch':
        model = GPT(new_config(vocab_size))
    elif init_from == 'resume':
        resumed, source = load_furthest(out_dir)
        saved = resumed
        say(f"resuming {source} at iteration {resumed.get('iter_num', 0)}")
    elif checkpoints.is_run(init_from):
        saved = checkpoints.load(os.path.join(init_from, 'ckpt.pt'))
    else:
        files = formats.files_of(init_from)
        tokenizer_state = check_tokenizer(files.tokenizer_state(), tokenizer_state, source, data_dir)
        model = GPT.from_pretrained(files, dict(dropout=dropout), torch.float32)
    if saved:
        model = checkpoints.build(saved, GPT, GPTConfig, dropout=dropout)
    if saved.get('tokenizer'):  # nanoGPT's has none
        tokenizer_state = check_tokenizer(saved['tokenizer'], tokenizer_state, source, data_dir)
    n_positions, is_chat = model.config.block_size, has_conversations(data_dir)  # their rows have any length
    if init_from == 'resume' and not is_chat and config.given.get('block_size') != 'command line':
        settle(config, 'block_size', n_positions, source, say, asked=block_size)
        block_size = n_positions
    if n_positions < block_size:
        raise ValueError(f"block_size {block_size} is more than the {n_positions} positions the model has: set it to "
                         f"{n_positions} or less, or use the config file the model was trained with")
    if model.config.window and model.config.window + model.config.n_sink >= block_size:
        raise ValueError(f"block_size {block_size} must be more than what the model's tokens see, a window of "
                         f"{model.config.window} and {model.config.n_sink} sinks: set it to {n_positions}, for example")
    settle_shape(config, model.config, source, say)
    if block_size < n_positions and not is_chat:
        say(f"block_size {block_size}: the model's {n_positions} positions are cut to that"
            f"{'' if eval_only else ', also in its checkpoints'}")
        model.crop_block_size(block_size)
    model.train()
    if parallel == 'ddp':  # else each process will take its part
        model.to(dev)
    n_tokens = gradient_accumulation_steps * batch_size * block_size
    say(f"model: {model.get_num_params() / 1e6:.2f}M parameters, on {dev}; tokens per iteration: "
        f"{'up to ' * is_chat}{n_tokens:,}")
    return model, resumed, tokenizer_state


def trial(model, optimizer, amp, batches):
    """One forward and backward pass, to be timed. It leaves weights, gradients and generators as they were."""
    with torch.random.fork_rng(devices=[]):
        with amp:
            loss = model(*batches(0))[1]
        loss.backward()
    optimizer.zero_grad(set_to_none=True)


def open_log(log, checkpointer, config, iter_num):
    """Start Weights & Biases, make and lock out_dir, open log.csv, unless nothing is left to train."""
    if init_from == 'resume' and iter_num >= max_iters and not eval_only:
        log.say(f"the checkpoint is at iteration {iter_num} and max_iters is {max_iters}: there is nothing left to "
                "train; to go on, give a larger --max_iters")
    if init_from == 'resume' and max_minutes and time.monotonic() - checkpointer.began >= 60 * max_minutes:
        log.say(f"the run has had its max_minutes, {max_minutes:g}: to go on, give a larger --max_minutes")
    if iter_num > max_iters and not eval_only:
        return
    if wandb_log:
        log.wandb = start_wandb(wandb_project, wandb_run_name, dict(config))
    if not eval_only:
        checkpointer.take_folder()
        if beside := checkpointer.is_of_earlier_run():
            log.say(f"{checkpointer.best} is of an earlier run: it stays until an evaluation of this run saves, and a "
                    "stop before that saves nothing")
        log.open_files(out_dir, iter_num, None if max_minutes else max_iters, beside)
    log.start_clock(iter_num)


@torch.no_grad()
def estimate_loss(model, batches, amp, is_to_stop):
    """
    {split: the mean loss over the scored tokens of eval_iters batches}, the same every time. None if asked to stop
    meanwhile. FloatingPointError if a loss is not finite.
    """
    model.eval()
    losses = {}
    for split in batches:
        total, n_scored = torch.zeros(2, device=batches[split].device)
        for step in range(eval_iters):
            if is_to_stop():
                model.train()
                return None
            x, y = batches[split](step)
            n = (y != -1).sum()
            with amp:
                total += model(x, y)[1] * n
            n_scored += n
        losses[split] = (total / n_scored).item()
    model.train()
    for split, loss in losses.items():
        if not math.isfinite(loss):
            raise FloatingPointError(f"the {split} loss is {loss}")
    return losses


def report_and_save(log, checkpointer, iter_num, lr, losses, best_val_loss, batches):
    """
    Report the losses of an evaluation on these batches, save a checkpoint if they or the settings ask for one or if it
    is the last one, and start the clock. Returns the best validation loss so far. losses: None if it was asked to stop.
    """
    if losses:
        log.evaluation(iter_num, lr, losses, {split: batches[split].in_words(loss) for split, loss in losses.items()})
        improved, best_val_loss = losses['val'] < best_val_loss, min(best_val_loss, losses['val'])
        # the state that a resumed run begins with is already in ckpt.pt or in ckpt_last.pt
        is_new = iter_num != checkpointer.first_iter or always_save_checkpoint and os.path.exists(checkpointer.last)
        asked = improved or is_new and (always_save_checkpoint or iter_num == max_iters)
        if iter_num > 0 and asked and not eval_only:
            ends = iter_num == max_iters and checkpointer.is_of_earlier_run()  # no other file would have its model
            log.say(checkpointer.save(iter_num, best_val_loss, best=improved or always_save_checkpoint or ends))
            log.replace_earlier()
        is_saved = os.path.exists(checkpointer.best) and not checkpointer.is_of_earlier_run()
        if iter_num == max_iters and is_saved and not eval_only:
            use = '--chat talks with it' if isinstance(batches['val'], Conversations) else 'draws samples'
            log.say(f"trained for {time.monotonic() - checkpointer.began:,.0f} s; "
                    f"python sample.py --out_dir={shlex.quote(out_dir)} {use}")
        log.save_picture(last=iter_num == max_iters)
    log.start_clock(iter_num)
    return best_val_loss


def optimizer_step(model, optimizer, scaler, amp, batches, iter_num, rank, world_size):
    """
    One update of the weights. Returns the mean loss over the scored tokens of gradient_accumulation_steps batches,
    which the processes share out. FloatingPointError, before the weights are changed, if it is not finite.
    """
    if dist.is_initialized():  # dropout: different in each process, the same in a resumed run
        torch.manual_seed(hash((seed, iter_num, rank)))
    micro_steps, first = gradient_accumulation_steps // world_size, iter_num * gradient_accumulation_steps
    n_scored = [batches.n_scored(first + i) for i in range(gradient_accumulation_steps)]
    n_all = sum(n_scored)
    loss_sum = torch.zeros((), device=batches.device)
    for micro_step in range(micro_steps):
        number = micro_step * world_size + rank
        x, y = batches(first + number)
        # gradients are averaged over the processes in the last backward pass; with fsdp in each, as only parts are kept
        last = micro_step == micro_steps - 1
        with nullcontext() if world_size == 1 or last or parallel == 'fsdp' else model.no_sync():
            with amp:
                loss = model(x, y)[1] / (n_all / (n_scored[number] * world_size))  # micro_steps if all score as many
            scaler.scale(loss).backward()
        loss_sum += loss.detach()
    if world_size > 1:
        dist.all_reduce(loss_sum)
        loss_sum /= world_size
    mean_loss = loss_sum.item()
    if not math.isfinite(mean_loss):
        raise FloatingPointError(f"the loss is {mean_loss}")
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return mean_loss


def log_iteration(log, model, iter_num, lr, loss, dev, world_size, batches):
    """Log the loss of an iteration and its speed: milliseconds, tokens a second, and MFU, if all rows are full."""
    devices.synchronize(dev)
    dt, rows = log.seconds_per_iter(iter_num), gradient_accumulation_steps * batch_size
    is_full = batches.tokens_per_row == model.config.block_size
    mfu = model.estimate_mfu(rows / world_size, dt, peak_flops or devices.default_peak_flops(dev)) if is_full else None
    log.iteration(iter_num, lr, loss, dt, rows * batches.tokens_per_row / dt, mfu)


if __name__ == '__main__':
    configurator.run(main)
