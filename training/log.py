"""What a training run reports: lines on stdout, a progress bar, log.csv, loss.png and Weights & Biases."""
import csv
import math
import os
import sys
import time

from tqdm import tqdm

import configurator
from whole_file import replacing


def start_wandb(project, name, config):
    """A new run of Weights & Biases. ValueError if its package is not installed."""
    try:
        import wandb
    except ImportError as e:
        raise ValueError("wandb_log=True needs wandb: pip install wandb") from e
    return wandb.init(project=project, name=name, config=config)


class Log:
    """
    The reports of a run. `say` works from the start, `open_files` starts log.csv and the progress bar, and setting
    `wandb` starts reports to Weights & Biases. Call `close` at the end.

    stop: a StopRequest, which is set when the reader of stdout has gone; silent: `say` prints nothing, for all
    processes of a run but the first.
    """

    def __init__(self, stop, silent=False):
        self.stop, self.silent, self.stream = stop, silent, sys.stdout
        self.file = self.bar = self.wandb = None
        self.mfu = -1.0  # a running average
        self.shortest, self.n_slow = math.inf, 0  # seconds of an iteration; how many of the last ones were slow
        self.start_clock(0)

    def open_files(self, out_dir, iter_num, max_iters):
        """Open log.csv and the progress bar of a run that begins at iter_num."""
        self.file = LogFile(out_dir, iter_num)
        self.bar = tqdm(total=max_iters, initial=iter_num, unit='it', disable=None, dynamic_ncols=True)

    def close(self):
        for report in (self.bar, self.file):
            if report is not None:
                report.close()
        if self.wandb is not None:
            self.wandb.finish()

    def say(self, text):
        """
        Print a line, above the progress bar if there is one. If the reader of stdout has gone (a closed pipe), the run
        is asked to stop, and this and all later lines go to stderr.
        """
        if self.silent:
            return
        if self.stream is sys.stdout:
            try:
                self.print(text)
                return
            except BrokenPipeError:
                configurator.silence(sys.stdout)
                self.stop.asked, self.stream = True, sys.stderr
                text = "nobody reads the output any more: stopping after this iteration"
        try:
            self.print(text)
        except BrokenPipeError:  # stderr had the same reader; the run can still save
            configurator.silence(sys.stderr)

    def print(self, text):
        with tqdm.external_write_mode():
            print(text, file=self.stream, flush=True)

    def start_clock(self, iter_num):
        """Time iterations from here on, the first being iter_num."""
        self.first_timed, self.start = iter_num, time.perf_counter()

    def seconds_per_iter(self, iter_num):
        """The mean time of the iterations since the clock was started, iter_num being the last."""
        return (time.perf_counter() - self.start) / (iter_num + 1 - self.first_timed)

    def evaluation(self, iter_num, lr, losses):
        """Report the losses {'train': ..., 'val': ...}, in nats per token, before iteration iter_num."""
        self.say(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if self.wandb is not None:
            self.wandb.log({'iter': iter_num, 'train/loss': losses['train'], 'val/loss': losses['val'], 'lr': lr,
                            'mfu': self.mfu * 100})
        if self.file is not None:
            self.file.row(iter=iter_num, lr=lr, train_loss=losses['train'], val_loss=losses['val'])

    def iteration(self, iter_num, lr, loss, dt, tokens_per_s, mfu):
        """Report the loss of iteration iter_num, which took dt seconds. mfu: a fraction, or None if it is not known."""
        if mfu is not None:
            self.mfu = mfu if self.mfu < 0 else 0.9 * self.mfu + 0.1 * mfu
        ms = dt * 1e3
        self.say_if_slow(dt)
        self.file.row(iter=iter_num, lr=lr, batch_loss=loss, ms_per_iter=ms, tokens_per_s=tokens_per_s, mfu=self.mfu)
        rate = f"{tokens_per_s:,.0f} tok/s, mfu " + (f"{self.mfu * 100:.1f}%" if self.mfu >= 0 else "unknown")
        if self.bar.disable:
            self.say(f"iter {iter_num}: loss {loss:.4f}, time {ms:.2f}ms, {rate}")
        else:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {rate}", refresh=False)
        self.start_clock(iter_num + 1)

    def say_if_slow(self, dt):
        """Say so on stderr, once, when five rows of the log have taken five times the shortest one, in seconds."""
        self.shortest, before = min(self.shortest, dt), self.n_slow
        self.n_slow = before if before == 5 else before + 1 if dt > 5 * self.shortest else 0
        if self.n_slow > before == 4:
            with tqdm.external_write_mode():
                print(f"an iteration takes {dt * 1e3:,.0f} ms now and took {self.shortest * 1e3:,.0f} before: other "
                      "programs may need the machine; on a CPU fewer threads (OMP_NUM_THREADS=1) need them less",
                      file=sys.stderr, flush=True)

    def advance(self):
        """Move the progress bar on by one iteration."""
        if self.bar is not None:
            self.bar.update()

    def save_picture(self, last):
        """Draw loss.png if there is a log.csv; see LogFile.save_picture."""
        if self.file is not None:
            self.file.save_picture(last)


class LogFile:
    """
    out_dir/log.csv, a row for each logged iteration and each evaluation, and its curves in out_dir/loss.png.

    A resumed run (iter_num > 0) keeps the rows before iter_num and writes the later ones again. To be closed.
    """
    columns = ('iter', 'lr', 'batch_loss', 'train_loss', 'val_loss', 'ms_per_iter', 'tokens_per_s', 'mfu')

    def __init__(self, out_dir, iter_num):
        self.path, self.rows = os.path.join(out_dir, 'log.csv'), []
        if iter_num and os.path.exists(self.path):
            with open(self.path, newline='') as f:  # the last row of a crashed run may be cut off: it has no iter
                rows = [row for row in csv.DictReader(f) if (row.get('iter') or '').isdigit()]
            self.rows = [row for row in rows if int(row['iter']) < iter_num]
        with replacing(self.path, 'w', newline='') as f:
            writer = csv.DictWriter(f, self.columns, restval='', extrasaction='ignore')
            writer.writeheader()
            writer.writerows(self.rows)
        self.file = open(self.path, 'a', newline='')
        self.writer = csv.DictWriter(self.file, self.columns, restval='')
        self.drawn = -math.inf

    def row(self, **values):
        row = {k: v if isinstance(v, int) else f'{v:.6g}' for k, v in values.items()}
        self.rows.append(row)
        self.writer.writerow(row)
        self.file.flush()

    def close(self):
        self.file.close()

    def save_picture(self, last, seconds=60.0):
        """Draw loss.png, which takes half a second, if `last`, or if it was not drawn within the last `seconds`."""
        if not last and time.monotonic() - self.drawn < seconds:
            return
        self.drawn = time.monotonic()
        from training.plotting import plt, save  # half a second: only where a picture is drawn
        fig, ax = plt.subplots(figsize=(7, 4), layout='constrained')
        for column, style in (('batch_loss', dict(color='0.8', lw=1)), ('train_loss', dict(color='C0', marker='.')),
                              ('val_loss', dict(color='C1', marker='.'))):
            points = [(int(row['iter']), float(row[column])) for row in self.rows if row.get(column)]
            if points:
                ax.plot(*zip(*points), label=column.replace('_', ' '), **style)
        ax.set(xlabel='iteration', ylabel='loss, nats per token')
        ax.grid(alpha=0.3)
        ax.legend()
        save(fig, self.path.replace('log.csv', 'loss.png'))
