"""
Train a GPT: from scratch, from GPT-2's weights, or on from where a run stopped.

    python train.py config/train_shakespeare_char.py
    python train.py config/train_shakespeare_char.py --init_from=resume
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Ctrl-C and SIGTERM save and stop; a second one stops at once. out_dir gets ckpt.pt, log.csv and loss.png.
"""
import csv
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import checkpoint as checkpoints
import configurator
import tokenizer as tokenizers
from batches import Batches
from device import autocast, pick_device, pick_dtype, synchronize
from model import GPT, GPTConfig
from whole_file import replacing

out_dir = 'out'                # where ckpt.pt, log.csv and loss.png go
eval_interval = 2000           # iterations between evaluations, and so between checkpoints
log_interval = 1               # iterations between rows of the log
eval_iters = 200               # batches an evaluation averages over
eval_only = False              # evaluate once, print, and stop
always_save_checkpoint = True  # at every evaluation; False keeps the best one only
init_from = 'scratch'          # scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl or a Hugging Face folder
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
learning_rate = 6e-4           # of AdamW, at its highest
max_iters = 600000             # optimizer steps in all
weight_decay = 1e-1            # of matrices and embeddings
beta1 = 0.9                    # of AdamW
beta2 = 0.95                   # of AdamW
grad_clip = 1.0                # the norm gradients are clipped to, 0.0 for none
decay_lr = True                # a cosine from learning_rate down to min_lr?
warmup_iters = 2000            # steps to get up to learning_rate
lr_decay_iters = 600000        # steps to get down to min_lr, about max_iters
min_lr = 6e-5                  # about learning_rate / 10
backend = 'auto'               # of DDP: nccl, gloo; auto is nccl on cuda and gloo elsewhere
device = 'auto'                # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'                 # float32, bfloat16 or float16 (with loss scaling); auto goes by the device
compile = True                 # torch.compile the model; on a CPU it is no faster, and left out
seed = 1337                    # of the weights, the data order and dropout
peak_flops = 0.0               # what MFU is relative to; 0 looks the device up


def main(config):
    if min(batch_size, gradient_accumulation_steps, eval_iters, eval_interval, log_interval) < 1 or max_iters < 0:
        raise ValueError("batch_size, gradient_accumulation_steps, eval_iters, eval_interval and log_interval must be at least 1, "
                         "and max_iters at least 0")
    if seed < 0:
        raise ValueError(f"seed must not be negative, but it is {seed}")
    dev, rank, world = join_processes()
    master = rank == 0
    if gradient_accumulation_steps % world:
        raise ValueError(f"gradient_accumulation_steps {gradient_accumulation_steps} must be divisible by the {world} processes")
    micro_steps = gradient_accumulation_steps // world
    tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
    stop = StopRequest()

    def say(text):
        try:
            if master:
                print(text, flush=True)
        except BrokenPipeError:  # whoever read our output has left: that is no reason to lose the run
            configurator.silence_stdout()
            stop.asked = True

    torch.manual_seed(seed + rank)
    torch.set_float32_matmul_precision('high')  # tf32 where there is tf32; sampling does without, to be exact
    if master:
        os.makedirs(out_dir, exist_ok=True)

    data_dir = os.path.join('data', dataset)
    if master and dataset.endswith('_char') and not os.path.exists(os.path.join(data_dir, 'train.bin')):
        prepare_dataset(data_dir)
    if world > 1:
        dist.barrier()
    meta, token_state = tokenizers.read_meta(data_dir), tokenizers.state_of_dataset(data_dir)
    say(f"data: {data_dir}, {meta.get('source', 'source unknown')}; tokens per iteration: {tokens_per_iter:,}")

    # the model
    model_args = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, bias=bias, dropout=dropout,
                      vocab_size=50304 if token_state['kind'] == 'gpt2' else meta.get('vocab_size') or len(token_state['chars']))
    iter_num, best_val_loss, resumed = 0, float('inf'), None
    if init_from == 'scratch':
        model = GPT(GPTConfig(**model_args))
    elif init_from == 'resume':
        resumed, path = load_furthest(out_dir, dev)
        model = checkpoints.build(resumed, GPT, GPTConfig, dropout=dropout)
        iter_num, best_val_loss = resumed.get('iter_num', 0), float(resumed.get('best_val_loss', math.inf))
        say(f"resuming {path} at iteration {iter_num}")
    else:
        model = GPT.from_pretrained(init_from, dict(dropout=dropout))
    if block_size < model.config.block_size:
        model.crop_block_size(block_size)
    model_args = vars(model.config).copy()
    if model.config.block_size < block_size:
        raise ValueError(f"block_size {block_size} is more than the {model.config.block_size} positions the model has: "
                         "give its own, or the config file it was trained with")
    if resumed and resumed.get('tokenizer', token_state) != token_state:
        raise ValueError(f"{data_dir} is encoded otherwise than what this model was trained on: prepare the same text again, or train anew")
    model.to(dev)
    say(f"model: {model.get_num_params() / 1e6:.2f}M parameters, on {dev}")

    # what trains it
    amp_dtype = pick_dtype(dtype, dev)
    amp = autocast(dev, amp_dtype)
    scaler = torch.amp.GradScaler(dev.split(':')[0], enabled=amp_dtype == 'float16')
    optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), dev.split(':')[0])
    if resumed:
        restore(optimizer, scaler, resumed)
    raw_model = model
    if compile and not dev.startswith('cpu'):
        say("compiling the model (about a minute)")
        model = torch.compile(model)
    eval_model = model
    if world > 1:
        model = DistributedDataParallel(model, device_ids=[dev] if dev.startswith('cuda') else None)

    def batches_of(split, stream):
        return Batches(data_dir, split, batch_size, block_size, raw_model.config.vocab_size, dev, seed + stream)
    train_batches = batches_of('train', 0)
    eval_batches = {split: batches_of(split, 1) for split in ('train', 'val')}

    @torch.no_grad()
    def estimate_loss():
        """Mean loss of each split over eval_iters batches, always the same ones. None if asked to stop meanwhile."""
        losses = {}
        raw_model.eval()
        for split, batches in eval_batches.items():
            total = torch.zeros((), device=dev)
            for k in range(eval_iters):
                if stop.asked:
                    raw_model.train()
                    return None
                with amp:
                    total += eval_model(*batches(k))[1]
            losses[split] = total.item() / eval_iters
        raw_model.train()
        return losses

    def save(name):
        if not all(p.isfinite().all() for p in raw_model.parameters()):
            raise ValueError(f"iteration {iter_num}, lr {lr:.2e}: the weights are not finite and were not saved; {last_good()}")
        path = os.path.join(out_dir, name)
        checkpoints.save({
            'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict(), 'model_args': model_args,
            'iter_num': iter_num, 'best_val_loss': best_val_loss, 'config': config, 'tokenizer': token_state,
            'rng': {'torch': torch.get_rng_state(), 'cuda': torch.cuda.get_rng_state_all()}, 'scaler': scaler.state_dict(),
        }, path)
        if name == 'ckpt.pt' and os.path.exists(os.path.join(out_dir, INTERRUPTED)):
            os.remove(os.path.join(out_dir, INTERRUPTED))  # of this run, and further back, or of one that is overwritten now
        return path

    def last_good():
        path = os.path.join(out_dir, 'ckpt.pt')
        return f"the last good checkpoint is {path}" if os.path.exists(path) else "there is no checkpoint yet"

    run = None
    if wandb_log and master:
        try:
            import wandb
        except ImportError as e:
            raise ValueError("wandb_log=True needs wandb: pip install wandb") from e
        run = wandb.init(project=wandb_project, name=wandb_run_name, config=config)
    log = Log(out_dir, iter_num) if master and not eval_only else None
    own_ckpt = resumed is not None  # is ckpt.pt, if there is one, of this run?
    bar = tqdm(total=max_iters, initial=iter_num, unit='it', disable=None if master and not eval_only else True, dynamic_ncols=True)
    write = say if bar.disable else bar.write

    if resumed and 'rng' in resumed:
        restore_rng(resumed['rng'])
    model.train()
    mfu, n_timed = -1.0, 0
    t0 = time.perf_counter()
    while True:
        lr = get_lr(iter_num) if decay_lr else learning_rate
        for group in optimizer.param_groups:
            group['lr'] = lr

        if (iter_num % eval_interval == 0 or iter_num == max_iters or eval_only) and master:
            losses = estimate_loss()
            if losses:
                if not all(map(math.isfinite, losses.values())):
                    raise ValueError(f"iteration {iter_num}, lr {lr:.2e}: the evaluated loss is not finite; {last_good()}")
                write(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
                if run:
                    run.log({'iter': iter_num, 'train/loss': losses['train'], 'val/loss': losses['val'], 'lr': lr, 'mfu': mfu * 100})
                improved = losses['val'] < best_val_loss
                best_val_loss = min(best_val_loss, losses['val'])
                if not eval_only:
                    log.row(iter=iter_num, lr=lr, train_loss=losses['train'], val_loss=losses['val'])
                    log.draw()
                    if iter_num > 0 and (improved or always_save_checkpoint):
                        write(f"saved {save('ckpt.pt')}")
                        own_ckpt = True
            t0, n_timed = time.perf_counter(), 0
        if stop.agreed(world, dev):
            if master and not eval_only:
                bar.close()
                # an interruption must not cost a better model, nor that of another run
                exists = os.path.exists(os.path.join(out_dir, 'ckpt.pt'))
                path = save('ckpt.pt' if not exists or (own_ckpt and always_save_checkpoint) else INTERRUPTED)
                say(f"stopped at iteration {iter_num}, saved to {path}; to go on, add --init_from=resume"
                    + ("" if own_ckpt or not exists else f" and first move it over the ckpt.pt of an earlier run in {out_dir}"))
            break
        if eval_only or iter_num >= max_iters:
            break
        if world > 1:  # each process its own dropout, and a resumed run the same again
            torch.manual_seed(hash((seed, iter_num, rank)))

        # micro_steps batches on each process; together they are gradient_accumulation_steps consecutive ones
        loss_sum = torch.zeros((), device=dev)
        for micro_step in range(micro_steps):
            x, y = train_batches(iter_num * gradient_accumulation_steps + micro_step * world + rank)
            last = micro_step == micro_steps - 1
            with nullcontext() if world == 1 or last else model.no_sync():
                with amp:
                    loss = model(x, y)[1] / micro_steps
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
        if world > 1:
            dist.all_reduce(loss_sum)
            loss_sum /= world
        if not math.isfinite(loss_sum):  # before the step, so that the weights stay good
            bar.close()
            raise ValueError(f"iteration {iter_num}, lr {lr:.2e}: the loss is {loss_sum.item()}; {last_good()}")
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        n_timed += 1

        if iter_num % log_interval == 0 and master:
            synchronize(dev)
            dt = (time.perf_counter() - t0) / n_timed
            now = raw_model.estimate_mfu(gradient_accumulation_steps * batch_size / world, dt, peak_flops or None)
            if now is not None:
                mfu = now if mfu < 0 else 0.9 * mfu + 0.1 * now
            log.row(iter=iter_num, lr=lr, batch_loss=loss_sum.item(), ms_per_iter=dt * 1e3, tokens_per_s=tokens_per_iter / dt, mfu=mfu)
            mfu_text = f"{mfu * 100:.1f}%" if mfu >= 0 else "unknown"
            if bar.disable:
                say(f"iter {iter_num}: loss {loss_sum.item():.4f}, time {dt * 1e3:.2f}ms, {tokens_per_iter / dt:,.0f} tok/s, mfu {mfu_text}")
            else:
                bar.set_postfix_str(f"loss {loss_sum.item():.3f}, {tokens_per_iter / dt:,.0f} tok/s, mfu {mfu_text}", refresh=False)
            t0, n_timed = time.perf_counter(), 0
        bar.update()
        iter_num += 1

    bar.close()
    if run:
        run.finish()
    if world > 1:
        dist.destroy_process_group()


INTERRUPTED = 'ckpt_interrupted.pt'


def join_processes():
    """(device, rank, world size); under torchrun the process group is joined."""
    dev = pick_device(device)
    if 'RANK' not in os.environ:
        return dev, 0, 1
    if dev == 'cuda':
        dev = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(dev)
    dist.init_process_group(backend if backend != 'auto' else 'nccl' if dev.startswith('cuda') else 'gloo')
    return dev, dist.get_rank(), dist.get_world_size()


def prepare_dataset(data_dir):
    script = os.path.join(data_dir, 'prepare.py')
    if not os.path.exists(script):
        raise ValueError(f"no {data_dir}/train.bin, and no {script} to make it")
    print(f"{data_dir} is not prepared yet: running {script}", flush=True)
    if subprocess.run([sys.executable, script]).returncode:
        raise ValueError(f"{script} failed: its message is above")


def get_lr(it):
    """Linear warmup, then a cosine from learning_rate down to min_lr at lr_decay_iters."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it >= lr_decay_iters:
        return min_lr
    progress = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


def load_furthest(out_dir, dev):
    """(checkpoint, path): ckpt.pt, or what an interruption left beside it if that is further along."""
    path, interrupted = os.path.join(out_dir, 'ckpt.pt'), os.path.join(out_dir, INTERRUPTED)
    loaded = checkpoints.load(path, dev)
    if os.path.exists(interrupted):
        other = checkpoints.load(interrupted, dev)
        if other['iter_num'] > loaded['iter_num']:
            return other, interrupted
    return loaded, path


def restore(optimizer, scaler, resumed):
    if 'optimizer' not in resumed:
        raise ValueError("the checkpoint has no optimizer state: it cannot be resumed")
    params = [p for group in optimizer.param_groups for p in group['params']]
    for p, state in zip(params, resumed['optimizer']['state'].values()):
        state |= {k: v[:len(p)] for k, v in state.items() if v.dim() and v.shape != p.shape}  # block_size was cropped
    fused = [group['fused'] for group in optimizer.param_groups]  # of this device, not of the one it was saved on
    optimizer.load_state_dict(resumed['optimizer'])
    for group, is_fused in zip(optimizer.param_groups, fused):
        group['fused'] = is_fused
    if resumed.get('scaler'):
        scaler.load_state_dict(resumed['scaler'])


def restore_rng(rng):
    torch.set_rng_state(rng['torch'].cpu())
    if len(rng['cuda']) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in rng['cuda']])


class StopRequest:
    """Ctrl-C or SIGTERM: the first asks, and the loop stops where it can save; the second is not to be argued with."""

    def __init__(self):
        self.asked = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.ask)

    def ask(self, signum, frame):
        if self.asked:
            os._exit(128 + signum)
        self.asked = True
        print(f"\n{signal.Signals(signum).name}: stopping after this iteration (again to stop at once)", file=sys.stderr, flush=True)

    def agreed(self, world, dev):
        """Has any process been asked? All learn of it at the same iteration, or one would wait for gradients forever."""
        if world > 1:
            asked = torch.tensor(float(self.asked), device=dev)
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            self.asked = bool(asked)
        return self.asked


class Log:
    """out_dir/log.csv, and its curves as out_dir/loss.png. A resumed run drops the rows it is about to write again."""
    columns = ('iter', 'lr', 'batch_loss', 'train_loss', 'val_loss', 'ms_per_iter', 'tokens_per_s', 'mfu')

    def __init__(self, out_dir, iter_num):
        self.path, self.rows = os.path.join(out_dir, 'log.csv'), []
        if iter_num and os.path.exists(self.path):
            with open(self.path, newline='') as f:
                self.rows = [row for row in csv.DictReader(f) if row['iter'].isdigit() and int(row['iter']) < iter_num]
        with replacing(self.path, 'w', newline='') as f:
            writer = csv.DictWriter(f, self.columns, restval='')
            writer.writeheader()
            writer.writerows(self.rows)
        self.file = open(self.path, 'a', newline='')
        self.writer = csv.DictWriter(self.file, self.columns, restval='')

    def row(self, **values):
        row = {k: v if isinstance(v, int) else f'{v:.6g}' for k, v in values.items()}
        self.rows.append(row)
        self.writer.writerow(row)
        self.file.flush()

    def draw(self):
        import matplotlib
        matplotlib.use('Agg')
        import matplotlib.pyplot as plt
        fig, ax = plt.subplots(figsize=(7, 4), layout='constrained')
        for column, style in (('batch_loss', dict(color='0.8', lw=1)), ('train_loss', dict(color='C0', marker='.')),
                              ('val_loss', dict(color='C1', marker='.'))):
            points = [(int(row['iter']), float(row[column])) for row in self.rows if row.get(column)]
            if points:
                ax.plot(*zip(*points), label=column.replace('_', ' '), **style)
        ax.set(xlabel='iteration', ylabel='loss, nats per token')
        ax.grid(alpha=0.3)
        ax.legend()
        with replacing(self.path.replace('log.csv', 'loss.png')) as f:
            fig.savefig(f, format='png', dpi=110)
        plt.close(fig)


if __name__ == '__main__':
    configurator.run(main)
