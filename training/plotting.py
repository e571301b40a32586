"""matplotlib, set up in one place: pictures go to files, and no window opens."""
import matplotlib

from whole_file import replacing

matplotlib.use('Agg')
import matplotlib.pyplot as plt

__all__ = ['plt', 'save']


def save(fig, path):
    """Write a figure to the file `path` as PNG, and close it."""
    with replacing(path) as f:
        fig.savefig(f, format='png', dpi=110)
    plt.close(fig)
