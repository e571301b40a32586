"""
Train a GPT: from scratch, from GPT-2's weights, or on from where a run stopped.

    python train.py config/train_shakespeare_char.py
    python train.py config/train_shakespeare_char.py --init_from=resume
    torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py

Ctrl-C and SIGTERM save and stop; a second one stops at once. out_dir gets ckpt.pt, log.csv and loss.png.
"""
import configurator  # isort: skip

import math
import os
import time
from contextlib import ExitStack, closing, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import checkpoint as checkpoints
import tokenizer as tokenizers
from batches import Batches, mean_loss, open_tokens, prepare
from device import autocast, choose_threads, join_processes, pick_device, pick_dtype, synchronize
from model import GPT, GPTConfig
from resuming import restore_optimizer, restore_rng, settle_shape
from saving import Saver, load_furthest
from stopping import Output, StopRequest
from training_log import Log, start_wandb
from whole_file import lock_folder

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
    world = int(os.environ.get('WORLD_SIZE', 1)) if 'RANK' in os.environ else 1
    check_settings(world)
    trainer = Trainer(config, world)
    trainer.load_data()
    trainer.make_model()
    trainer.make_optimizer()
    if trainer.resumed and trainer.iter_num >= max_iters and not eval_only:
        trainer.say(f"the checkpoint is at iteration {trainer.iter_num} and max_iters is {max_iters}: there is nothing "
                    "left to train; to go on, give a larger --max_iters")
    if trainer.iter_num <= max_iters or eval_only:
        with trainer.writing():
            trainer.train()
    if world > 1:
        dist.destroy_process_group()


def check_settings(world):
    for name, least in dict(batch_size=1, gradient_accumulation_steps=1, eval_iters=1, eval_interval=1, log_interval=1,
                            max_iters=0, seed=0).items():
        if globals()[name] < least:
            raise ValueError(f"{name} must be at least {least}, but it is {globals()[name]}")
    if gradient_accumulation_steps % world:
        raise ValueError(f"gradient_accumulation_steps {gradient_accumulation_steps} must be divisible by the {world} "
                         "processes")
    if init_from == 'scratch':
        GPTConfig(block_size, 1, n_layer, n_head, n_embd, dropout, bias)
    pick_dtype(dtype, pick_device(device))


def get_lr(it):
    """Linear warmup, then a cosine from learning_rate down to min_lr at lr_decay_iters."""
    if not decay_lr:
        return learning_rate
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it >= lr_decay_iters:
        return min_lr
    progress = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


class Trainer:
    """One run of train.py: main calls its methods in the order in which they stand here."""

    def __init__(self, config, world):
        self.config, self.world = config, world
        self.stop = StopRequest()
        self.output = Output(self.stop)
        self.master = configurator.rank() == 0 if world > 1 else True
        self.lock = None
        if os.path.isdir(out_dir):
            self.lock_out_dir()
        self.dev, self.rank = join_processes(device, backend, world)
        self.iter_num, self.best_val_loss, self.resumed, self.log, self.wandb = 0, math.inf, None, None, None
        torch.manual_seed(seed + self.rank)
        torch.set_float32_matmul_precision('high')  # tf32 where there is tf32; sampling does without, to be exact

    def say(self, text):
        if self.master:
            self.output.say(text)

    def lock_out_dir(self):
        if self.master and not eval_only and self.lock is None:
            self.lock = lock_folder(out_dir)

    def load_data(self):
        self.data_dir = os.path.join('data', dataset)
        if self.master and dataset.endswith('_char') and not os.path.exists(os.path.join(self.data_dir, 'train.bin')):
            prepare(self.data_dir)
        if self.world > 1:
            dist.barrier()
        for split in ('train', 'val'):
            open_tokens(self.data_dir, split, block_size)
        meta, self.token_state = tokenizers.read_meta(self.data_dir), tokenizers.state_of_dataset(self.data_dir)
        gpt2 = self.token_state['kind'] == 'gpt2'  # a multiple of 64, because matmuls like that
        self.vocab_size = 50304 if gpt2 else meta.get('vocab_size') or len(self.token_state['chars'])
        self.tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
        self.say(f"data: {self.data_dir}, {meta.get('source', 'source unknown')}; "
                 f"tokens per iteration: {self.tokens_per_iter:,}")

    def make_model(self):
        source = init_from
        if init_from == 'scratch':
            model = GPT(GPTConfig(block_size, self.vocab_size, n_layer, n_head, n_embd, dropout, bias))
        elif init_from == 'resume':
            self.resumed, source = load_furthest(out_dir, self.dev)
            model = checkpoints.build(self.resumed, GPT, GPTConfig, dropout=dropout)
            self.iter_num = self.resumed.get('iter_num', 0)
            self.best_val_loss = float(self.resumed.get('best_val_loss', math.inf))
            self.say(f"resuming {source} at iteration {self.iter_num}")
        else:
            model = GPT.from_pretrained(init_from, dict(dropout=dropout))
        if model.config.block_size < block_size:
            raise ValueError(f"block_size {block_size} is more than the {model.config.block_size} positions the model "
                             "has: give its own, or the config file it was trained with")
        if self.resumed and self.resumed.get('tokenizer', self.token_state) != self.token_state:
            raise ValueError(f"{self.data_dir} is encoded otherwise than what this model was trained on: prepare the "
                             "same text again, or train anew")
        settle_shape(self.config, model.config, source, self.say)
        if block_size < model.config.block_size:
            self.say(f"block_size {block_size}: the model's {model.config.block_size} positions are cut to that")
            model.crop_block_size(block_size)
        self.model = self.raw_model = model.to(self.dev)
        self.say(f"model: {model.get_num_params() / 1e6:.2f}M parameters, on {self.dev}")

    def make_optimizer(self):
        amp_dtype = pick_dtype(dtype, self.dev)
        self.amp = autocast(self.dev, amp_dtype)
        kind = self.dev.split(':')[0]
        self.scaler = torch.amp.GradScaler(kind, enabled=amp_dtype == 'float16')
        self.optimizer = self.raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), kind)
        if self.resumed:
            restore_optimizer(self.config, self.optimizer, self.scaler, self.resumed, self.say)
        self.train_batches = self.batches_of('train', 0)
        self.eval_batches = {split: self.batches_of(split, 1) for split in ('train', 'val')}
        self.raw_model.train()
        threads = (self.resumed or {}).get('threads')
        if self.dev == 'cpu' and self.world == 1 and not eval_only and (threads or self.iter_num < max_iters):
            choose_threads(self.trial, threads, self.say)
        if compile and not self.dev.startswith('cpu'):
            self.say("compiling the model (about a minute)")
            self.model = torch.compile(self.model)
        self.eval_model = self.model
        if self.world > 1:
            self.model = DistributedDataParallel(self.model, device_ids=[self.dev] if kind == 'cuda' else None)
        if self.resumed and 'rng' in self.resumed:
            restore_rng(self.resumed['rng'])

    def batches_of(self, split, stream):
        vocab_size = self.raw_model.config.vocab_size
        return Batches(self.data_dir, split, batch_size, block_size, vocab_size, self.dev, seed + stream)

    def trial(self):
        """A forward and backward pass that changes nothing: no generator, no weights, no gradients."""
        with torch.random.fork_rng(devices=[]):
            with self.amp:
                loss = self.raw_model(*self.train_batches(0))[1]
            loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def writing(self):
        """Take out_dir and open the log, the bar and wandb; close them in the end. From here on there are files."""
        with ExitStack() as stack:
            if self.master and wandb_log:
                self.wandb = start_wandb(wandb_project, wandb_run_name, dict(self.config))
                stack.callback(self.wandb.finish)
            if self.master and not eval_only:
                os.makedirs(out_dir, exist_ok=True)
                self.lock_out_dir()
                self.log = stack.enter_context(closing(Log(out_dir, self.iter_num)))
                bar = tqdm(total=max_iters, initial=self.iter_num, unit='it', disable=None, dynamic_ncols=True)
                self.output.bar = stack.enter_context(bar)
            yield

    def train(self):
        self.first_iter, self.saver = self.iter_num, Saver(out_dir, own=self.resumed is not None)
        self.resumed = None  # its tensors are in the model and the optimizer
        self.mfu, self.n_timed, self.t0 = -1.0, 0, time.perf_counter()
        while True:
            self.lr = get_lr(self.iter_num)
            for group in self.optimizer.param_groups:
                group['lr'] = self.lr
            if (self.iter_num % eval_interval == 0 or self.iter_num == max_iters or eval_only) and self.master:
                self.evaluate()
                self.t0, self.n_timed = time.perf_counter(), 0
            if self.stop.agreed(self.world, self.dev):
                self.save_and_stop()
                break
            if eval_only or self.iter_num >= max_iters:
                break
            loss = self.step()
            self.n_timed += 1
            if self.iter_num % log_interval == 0 and self.master:
                self.report(loss)
                self.t0, self.n_timed = time.perf_counter(), 0
            self.iter_num += 1
            if self.output.bar is not None:
                self.output.bar.update()

    def step(self):
        """
        One optimizer step. Returns the loss, a tensor.

        micro_steps batches on each process; together they are gradient_accumulation_steps consecutive ones.
        """
        if self.world > 1:  # each process its own dropout, and a resumed run the same again
            torch.manual_seed(hash((seed, self.iter_num, self.rank)))
        micro_steps = gradient_accumulation_steps // self.world
        loss_sum = torch.zeros((), device=self.dev)
        for micro_step in range(micro_steps):
            x, y = self.train_batches(self.iter_num * gradient_accumulation_steps + micro_step * self.world + self.rank)
            last = micro_step == micro_steps - 1
            with nullcontext() if self.world == 1 or last else self.model.no_sync():
                with self.amp:
                    loss = self.model(x, y)[1] / micro_steps
                self.scaler.scale(loss).backward()
            loss_sum += loss.detach()
        if self.world > 1:
            dist.all_reduce(loss_sum)
            loss_sum /= self.world
        self.check_finite("the loss is", loss_sum.item())  # before the step, so that the weights stay good
        if grad_clip != 0.0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.raw_model.parameters(), grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_sum

    def report(self, loss):
        synchronize(self.dev)
        dt = (time.perf_counter() - self.t0) / self.n_timed
        rows_per_process = gradient_accumulation_steps * batch_size / self.world
        now = self.raw_model.estimate_mfu(rows_per_process, dt, peak_flops or None)
        if now is not None:
            self.mfu = now if self.mfu < 0 else 0.9 * self.mfu + 0.1 * now
        loss, ms, tokens_per_s = loss.item(), dt * 1e3, self.tokens_per_iter / dt
        self.log.row(iter=self.iter_num, lr=self.lr, batch_loss=loss, ms_per_iter=ms, tokens_per_s=tokens_per_s,
                     mfu=self.mfu)
        rate = f"{tokens_per_s:,.0f} tok/s, mfu " + (f"{self.mfu * 100:.1f}%" if self.mfu >= 0 else "unknown")
        if self.output.bar.disable:
            self.say(f"iter {self.iter_num}: loss {loss:.4f}, time {ms:.2f}ms, {rate}")
        else:
            self.output.bar.set_postfix_str(f"loss {loss:.3f}, {rate}", refresh=False)

    def evaluate(self):
        """Evaluate, say and log the losses, and save if it is time to. Nothing, if asked to stop meanwhile."""
        losses = self.estimate_loss()
        if losses is None:
            return
        for split in losses:
            self.check_finite(f"the {split} loss is", losses[split])
        self.say(f"step {self.iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if self.wandb:
            self.wandb.log({'iter': self.iter_num, 'train/loss': losses['train'], 'val/loss': losses['val'],
                            'lr': self.lr, 'mfu': self.mfu * 100})
        improved = losses['val'] < self.best_val_loss
        self.best_val_loss = min(self.best_val_loss, losses['val'])
        if eval_only:
            return
        self.log.row(iter=self.iter_num, lr=self.lr, train_loss=losses['train'], val_loss=losses['val'])
        if self.iter_num > 0 and (improved or always_save_checkpoint):
            self.say(f"saved {self.saver.save(self.checkpoint())}")
        self.log.draw(self.iter_num >= max_iters)

    def estimate_loss(self):
        """Mean loss of each split over eval_iters batches, always the same ones. None if asked to stop meanwhile."""
        self.raw_model.eval()
        losses = {split: mean_loss(self.eval_model, batches, eval_iters, self.amp, lambda: self.stop.asked)
                  for split, batches in self.eval_batches.items()}
        self.raw_model.train()
        return None if None in losses.values() else losses

    def check_finite(self, what, value):
        if not math.isfinite(value):
            raise ValueError(f"iteration {self.iter_num}, lr {self.lr:.2e}: {what} {value}; {self.saver.last_good()}")

    def checkpoint(self):
        """What is saved. ValueError if the weights are not finite."""
        if not all(p.isfinite().all() for p in self.raw_model.parameters()):
            raise ValueError(f"iteration {self.iter_num}, lr {self.lr:.2e}: the weights are not finite and were not "
                             f"saved; {self.saver.last_good()}")
        return {
            'model': self.raw_model.state_dict(), 'optimizer': self.optimizer.state_dict(),
            'model_args': vars(self.raw_model.config).copy(),
            'iter_num': self.iter_num, 'best_val_loss': self.best_val_loss,
            'config': dict(self.config), 'tokenizer': self.token_state, 'scaler': self.scaler.state_dict(),
            'rng': {'torch': torch.get_rng_state(), 'cuda': torch.cuda.get_rng_state_all()},
            'threads': torch.get_num_threads(),
        }

    def save_and_stop(self):
        if not self.master or eval_only:
            return
        self.output.bar.close()
        if self.iter_num == self.first_iter:
            self.say(f"stopped at iteration {self.iter_num}, before an iteration was done: there is nothing to save")
            return
        told = self.saver.save_interrupted(self.checkpoint(), replace=always_save_checkpoint)
        self.say(f"stopped at iteration {self.iter_num}, {told}")
        self.log.draw(last=True)


if __name__ == '__main__':
    configurator.run(main)
