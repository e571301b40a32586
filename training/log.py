"""What a training run reports: lines on stdout, a progress bar, log.csv, loss.png and Weights & Biases."""
import csv
import math
import os
import sys
import time
from contextlib import suppress

from tqdm import tqdm

import configurator
from whole_file import replacing

COLUMNS = 'iter', 'lr', 'batch_loss', 'train_loss', 'val_loss', 'ms_per_iter', 'tokens_per_s', 'mfu'  # of log.csv
MOST_POINTS = 5000  # of a curve of loss.png


def start_wandb(project, name, config):
    """A new run of Weights & Biases. ValueError if its package is not installed, or it does not start."""
    try:
        import wandb
    except ImportError as e:
        raise ValueError("wandb_log=True needs wandb: pip install wandb") from e
    try:
        return wandb.init(project=project, name=name, config=config)
    except Exception as e:  # its own kinds of error, for a missing login for example
        raise ValueError(f"Weights & Biases does not start ({' '.join(str(e).split())[:200]}): run `wandb login`, or "
                         "leave wandb_log out") from e


class Log:
    """
    The reports of a run. `say` works from the start, `open_files` starts log.csv and the progress bar, and setting
    `wandb` starts reports to Weights & Biases. Call `close` at the end. Without files, rows and pictures are left out.

    stop: a StopRequest, which is set when the reader of stdout has gone; silent: `say` prints nothing, for all
    processes of a run but the first.
    """

    def __init__(self, stop, silent=False):
        self.stop, self.silent, self.stream = stop, silent, sys.stdout
        self.file = self.wandb = None
        self.bar = tqdm(disable=True)
        self.mfu = -1.0  # a running average

    def open_files(self, out_dir, iter_num, max_iters, beside=False):
        """
        Open the progress bar and out_dir/log.csv, which gets a row for each logged iteration and each evaluation. A
        resumed run (iter_num > 0) keeps the rows before iter_num and writes the later ones again. beside: the files of
        an earlier run stay until `replace_earlier`, and rows go to log_new.csv.
        """
        self.path, rows, self.drawn = os.path.join(out_dir, 'log.csv'), [], -math.inf
        path = os.path.join(out_dir, 'log_new.csv') if beside else self.path
        if iter_num and os.path.exists(self.path):
            # rows without an iter come from a crash or a damaged file, and are dropped
            with open(self.path, newline='', errors='replace') as f, suppress(csv.Error):
                for row in csv.DictReader(f):
                    if (row.get('iter') or '').isdecimal() and int(row['iter']) < iter_num:
                        rows.append(row)
        with replacing(path, 'w', newline='') as f:
            writer = csv.DictWriter(f, COLUMNS, restval='', extrasaction='ignore')
            writer.writeheader()
            writer.writerows(rows)
        self.file = open(path, 'a', newline='')
        self.bar = tqdm(total=max_iters, initial=iter_num, unit='it', disable=None, dynamic_ncols=True)

    def replace_earlier(self):
        """This run has saved: its log.csv replaces that of an earlier run."""
        if self.file is not None and self.file.name != self.path:
            self.file.close()
            os.replace(self.file.name, self.path)
            self.file = open(self.path, 'a', newline='')

    def close(self):
        self.bar.close()
        if self.file is not None:
            self.file.close()
            if self.file.name != self.path:
                with suppress(OSError):  # somebody may have removed it
                    os.remove(self.file.name)
        if self.wandb is not None:
            self.wandb.finish()

    def say(self, text):
        """
        Print a line, above the progress bar if there is one. If stdout cannot be written (its reader or its terminal
        has gone, or its disk is full), the run is asked to stop, so that it saves, and all later lines go to stderr.
        """
        if self.silent:
            return
        try:
            with tqdm.external_write_mode():
                print(text, file=self.stream, flush=True)
        except OSError as e:  # of stderr too, where it was the same: the run can still save
            configurator.silence(self.stream)
            self.stop.asked, self.stream = True, sys.stderr
            self.say(f"stdout cannot be written ({e.strerror}): the run saves and stops")

    def start_clock(self, iter_num):
        """Time iterations from here on, the first being iter_num."""
        self.first_timed, self.start = iter_num, time.perf_counter()

    def seconds_per_iter(self, iter_num):
        """The mean time of the iterations since the clock was started, iter_num being the last."""
        return (time.perf_counter() - self.start) / (iter_num + 1 - self.first_timed)

    def evaluation(self, iter_num, lr, losses, in_words):
        """Report losses {'train': ..., 'val': ...}, in nats a token, before iteration iter_num. in_words: as texts."""
        self.say(f"step {iter_num}: train loss {in_words['train']}, val loss {in_words['val']}")
        if self.wandb is not None:
            self.wandb.log({'iter': iter_num, 'train/loss': losses['train'], 'val/loss': losses['val'], 'lr': lr,
                            'mfu': self.mfu * 100})
        self.row(iter=iter_num, lr=lr, train_loss=losses['train'], val_loss=losses['val'])

    def iteration(self, iter_num, lr, loss, dt, tokens_per_s, mfu):
        """Report the loss of iteration iter_num, which took dt seconds. mfu: a fraction, or None if it is not known."""
        if mfu is not None:
            self.mfu = mfu if self.mfu < 0 else 0.9 * self.mfu + 0.1 * mfu
        ms = dt * 1e3
        self.row(iter=iter_num, lr=lr, batch_loss=loss, ms_per_iter=ms, tokens_per_s=tokens_per_s, mfu=self.mfu)
        rate = f"{tokens_per_s:,.0f} tok/s" + (f", mfu {self.mfu:.1%}" if self.mfu >= 0 else "")
        if self.bar.disable:
            self.say(f"iter {iter_num}: loss {loss:.4f}, time {ms:.2f}ms, {rate}")
        else:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {rate}", refresh=False)
        self.start_clock(iter_num + 1)

    def row(self, **values):
        """Add a row to log.csv. values: of some of COLUMNS. A run whose log.csv cannot be written goes on without."""
        if self.file is not None:
            row = {name: x if isinstance(x, int) else f'{x:.6g}' for name, x in values.items()}
            try:
                csv.DictWriter(self.file, COLUMNS, restval='').writerow(row)
                self.file.flush()
            except OSError as e:
                self.say(f"{self.file.name} cannot be written ({e.strerror}), and the run goes on without it")
                with suppress(OSError):
                    self.file.close()
                self.file = None

    def save_picture(self, last):
        """
        Draw the curves of log.csv as loss.png beside it, which takes half a second, if this is the `last` picture, or
        if none was drawn within the last minute. The picture of an earlier run stays as long as its log.csv.
        """
        if self.file is None or self.file.name != self.path or not last and time.monotonic() - self.drawn < 60:
            return
        self.drawn = time.monotonic()
        styles = dict(batch_loss=dict(color='0.8', lw=1), train_loss=dict(color='C0', marker='.'),
                      val_loss=dict(color='C1', marker='.'))
        try:
            from matplotlib.figure import Figure  # half a second: only where a picture is drawn
            fig = Figure(figsize=(7, 4), layout='constrained')
            ax = fig.subplots()
            ax.set(xlabel='iteration', ylabel='loss, nats per token')
            ax.grid(alpha=0.3)
            for column, style in styles.items():
                with open(self.file.name, newline='') as f:
                    points = [(int(row['iter']), float(row[column])) for row in csv.DictReader(f) if row.get(column)]
                if points:
                    shown = points[::-1][::math.ceil(len(points) / MOST_POINTS)]  # the newest one among them
                    ax.plot(*zip(*shown), label=column.replace('_', ' '), **style)
            ax.legend()
            with replacing(self.path.replace('log.csv', 'loss.png')) as f:
                fig.savefig(f, format='png', dpi=110)
        except (OSError, ImportError, ValueError, TypeError, csv.Error) as e:  # others may have written to log.csv
            why = getattr(e, 'strerror', None) or e
            self.say(f"loss.png cannot be written ({why}), and the run goes on without it")
