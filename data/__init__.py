"""
Data sets. Each has a folder, and the prepare.py in it writes train.bin and val.bin.

    prepare_text   what these scripts share: a text, or its download, becomes tokens
"""
