"""What a training run writes down as it goes: log.csv, and its curves as loss.png."""
import csv
import math
import os
import time

from whole_file import replacing


def start_wandb(project, name, config):
    """A run of Weights & Biases. ValueError if its package is not installed."""
    try:
        import wandb
    except ImportError as e:
        raise ValueError("wandb_log=True needs wandb: pip install wandb") from e
    return wandb.init(project=project, name=name, config=config)


class Log:
    """
    out_dir/log.csv, a row for each logged iteration and each evaluation, and out_dir/loss.png.

    A resumed run (iter_num > 0) keeps the rows before iter_num and writes the others again. To be closed.
    """
    columns = ('iter', 'lr', 'batch_loss', 'train_loss', 'val_loss', 'ms_per_iter', 'tokens_per_s', 'mfu')

    def __init__(self, out_dir, iter_num):
        self.path, self.rows = os.path.join(out_dir, 'log.csv'), []
        if iter_num and os.path.exists(self.path):
            with open(self.path, newline='') as f:
                rows = [row for row in csv.DictReader(f) if (row.get('iter') or '').isdigit()]  # others are torn
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

    def draw(self, last, seconds=60.0):
        """Draw the curves, half a second's work, if `last`, or if they were not drawn for so many seconds."""
        if not last and time.monotonic() - self.drawn < seconds:
            return
        self.drawn = time.monotonic()
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
