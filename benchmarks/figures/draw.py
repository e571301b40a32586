"""
Draws the pictures of the documents that show no measurement, beside this file.

    python benchmarks/figures/draw.py
"""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[0] = os.path.dirname(os.path.dirname(HERE))  # the repository

from benchmarks.figures import caches, house, masks, step

PICTURES = dict(masks=masks.draw, cells=caches.draw_cells, blocks=caches.draw_blocks, step=step.draw, house=house.draw)

if __name__ == '__main__':
    for name, draw in PICTURES.items():
        path = os.path.join(HERE, name + '.png')
        draw(path)
        print(path)
